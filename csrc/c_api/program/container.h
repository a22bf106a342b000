// Files of named tensors and texts, in the format of safetensors, as metalcore/programs/files/container.py writes and
// reads them. They may come from strangers: all sizes have to fit each other and the file.
#pragma once

#include "json.h"

#include <metalcore.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::c_api {

// A dtype of tensors in files.
struct Dtype {
  metalcore_dtype number;
  const char* name;  // PyTorch's
  const char* code;  // safetensors'
  size_t size;       // of an element, in bytes
  bool is_float;
};

// nullptr where no program may have such a dtype.
const Dtype* dtype_named(std::string_view name);
const Dtype* dtype_of_code(std::string_view code);

// Converts `count` numbers between two floating-point dtypes, to the nearest one, and to the even one of two.
void convert(const void* from, const Dtype& from_dtype, void* to, const Dtype& to_dtype, size_t count);

struct Entry {
  const Dtype* dtype;  // nullptr for one that no program has
  std::vector<int64_t> shape;
  uint64_t begin, size;  // in bytes, from the end of the header
};

class Container {
 public:
  // Throws Error(METALCORE_INVALID_FILE), as all functions here do.
  explicit Container(const std::string& path);
  ~Container();
  Container(const Container&) = delete;

  // nullptr where there is none.
  const std::string* metadata(std::string_view name) const;
  const Entry* entry(std::string_view name) const;

  bool has_digest() const { return metadata("digest") != nullptr; }
  // Throws unless the file has its digest, and is as it was when that was made.
  void check_digest() const;
  std::string read(const Entry& entry) const;

  [[noreturn]] void fail(const std::string& reason) const;

 private:
  void read_header();
  Entry entry_of(const Json& described) const;
  void read_at(uint64_t place, char* data, size_t size) const;

  const std::string path_;
  int file_;
  uint64_t size_ = 0, begin_ = 0;  // of the file; of the tensors
  std::string header_;
  std::map<std::string, std::string, std::less<>> metadata_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace metalcore::c_api
