#include "container.h"

#include "../error.h"
#include "sha256.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

constexpr uint64_t kMostHeader = 100'000'000;  // bytes, as in the format's own reader
constexpr size_t kMostDimensions = 64, kBlock = 1 << 20, kDigits = 64;
constexpr int64_t kMostSize = int64_t{1} << 48;
constexpr std::string_view kLead = "{\"__metadata__\":{\"digest\":\"";  // in front of the digest

// The size of each dtype that the format has. Programs have those of dtype.h.
uint64_t bytes_of(std::string_view code) {
  for (const std::string_view known : {"F64", "I64", "U64", "C64"})
    if (code == known) return 8;
  for (const std::string_view known : {"F32", "I32", "U32"})
    if (code == known) return 4;
  for (const std::string_view known : {"F16", "BF16", "I16", "U16"})
    if (code == known) return 2;
  for (const std::string_view known : {"I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"})
    if (code == known) return 1;
  throw std::runtime_error("an unknown dtype");
}

}  // namespace

Container::Container(const std::string& path)
    : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (file_ < 0) fail(std::string("it cannot be opened: ") + std::strerror(errno));
  try {
    read_header();
  } catch (const std::runtime_error& error) {
    close(file_);
    if (dynamic_cast<const Error*>(&error)) throw;
    fail(std::string("its header cannot be read: ") + error.what());
  } catch (...) {
    close(file_);
    throw;
  }
}

Container::~Container() { close(file_); }

void Container::fail(const std::string& reason) const { throw Error(METALCORE_INVALID_FILE, path_ + ": " + reason); }

void Container::read_at(uint64_t place, char* data, size_t size) const {
  while (size > 0) {
    const ssize_t count = pread(file_, data, std::min(size, kBlock), static_cast<off_t>(place));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail("it was cut short while it was read");
    data += count, place += static_cast<uint64_t>(count), size -= static_cast<size_t>(count);
  }
}

void Container::read_header() {
  struct stat status;
  if (fstat(file_, &status) || !S_ISREG(status.st_mode)) fail("it is no regular file");
  size_ = static_cast<uint64_t>(status.st_size);
  unsigned char length[8];
  if (size_ < 10) fail("it is no file of this kind");
  read_at(0, reinterpret_cast<char*>(length), sizeof length);
  uint64_t bytes = 0;
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | length[i];
  if (bytes < 2 || bytes > std::min(size_ - 8, kMostHeader))
    fail("it is no file of this kind, or its beginning is damaged");
  begin_ = 8 + bytes;
  header_.resize(bytes);
  read_at(8, header_.data(), bytes);
  const Json header = Json::parse(header_);
  std::vector<std::pair<uint64_t, uint64_t>> places;
  for (size_t i = 0; i < header.object().keys.size(); ++i) {
    const Json& described = header.items[i];
    if (header.keys[i] == "__metadata__") {
      for (size_t j = 0; j < described.object().keys.size(); ++j)
        metadata_.emplace(described.keys[j], described.items[j].string());
      continue;
    }
    const Entry entry = entry_of(described);
    places.emplace_back(entry.begin, entry.begin + entry.size);
    entries_.emplace(header.keys[i], entry);
  }
  std::sort(places.begin(), places.end());
  uint64_t end = 0;
  for (const auto& [begin, behind] : places) {
    if (begin != end) fail("its tensors overlap, or leave gaps");
    end = behind;
  }
  if (end != size_ - begin_) fail("it has another size than its header says; it may be cut short");
}

Entry Container::entry_of(const Json& described) const {
  if (described.object().keys.size() != 3) throw std::runtime_error("a tensor is described in no known way");
  const std::string& code = described.at("dtype").string();
  const std::vector<Json>&shape = described.at("shape").array(), &offsets = described.at("data_offsets").array();
  if (offsets.size() != 2 || shape.size() > kMostDimensions) throw std::runtime_error("no possible shape or place");
  const uint64_t begin = offsets[0].size(kMostSize), end = offsets[1].size(kMostSize);
  uint64_t bytes = bytes_of(code);
  Entry entry = {dtype_of_code(code), {}, begin, end - begin};
  for (const Json& size : shape) {
    entry.shape.push_back(static_cast<int64_t>(size.size(kMostSize)));
    if (__builtin_mul_overflow(bytes, size.size(kMostSize), &bytes)) throw std::runtime_error("no possible shape");
  }
  if (begin > end || bytes != end - begin)
    throw std::runtime_error("a tensor has another size than its shape and dtype say");
  return entry;
}

const std::string* Container::metadata(std::string_view name) const {
  const auto found = metadata_.find(name);
  return found == metadata_.end() ? nullptr : &found->second;
}

const Entry* Container::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

void Container::check_digest() const {
  Sha256 digest;
  std::string beginning(8, '\0');
  for (size_t i = 0; i < 8; ++i) beginning[i] = static_cast<char>(header_.size() >> (8 * i));
  beginning += header_;
  const size_t place = 8 + kLead.size();
  const bool there = header_.size() > kLead.size() + kDigits && header_.compare(0, kLead.size(), kLead) == 0;
  const std::string given = there ? beginning.substr(place, kDigits) : "";
  if (there) beginning.replace(place, kDigits, kDigits, '0');
  digest.update(beginning.data(), beginning.size());
  std::vector<char> block(kBlock);
  for (uint64_t at = begin_; at < size_; at += block.size()) {
    const size_t bytes = std::min<uint64_t>(block.size(), size_ - at);
    read_at(at, block.data(), bytes);
    digest.update(block.data(), bytes);
  }
  if (given != digest.finish()) fail("it is damaged: its digest is another one");
}

std::string Container::read(const Entry& entry) const {
  std::string data(entry.size, '\0');
  read_at(begin_ + entry.begin, data.data(), data.size());
  if (entry.dtype && entry.dtype->number == METALCORE_BOOL)
    for (const char value : data)
      if (static_cast<unsigned char>(value) > 1) fail("it has values that are neither true nor false");
  return data;
}

}  // namespace metalcore::c_api
