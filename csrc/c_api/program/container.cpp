#include "container.h"

#include "../error.h"
#include "sha256.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

constexpr Dtype kDtypes[] = {
    {METALCORE_FLOAT32, "float32", "F32", 4, true},    {METALCORE_FLOAT16, "float16", "F16", 2, true},
    {METALCORE_BFLOAT16, "bfloat16", "BF16", 2, true}, {METALCORE_INT64, "int64", "I64", 8, false},
    {METALCORE_INT32, "int32", "I32", 4, false},       {METALCORE_INT16, "int16", "I16", 2, false},
    {METALCORE_INT8, "int8", "I8", 1, false},          {METALCORE_UINT8, "uint8", "U8", 1, false},
    {METALCORE_BOOL, "bool", "BOOL", 1, false},
};

float float_of_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

float float_of_half(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -small : small;
}

uint16_t bfloat16_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t half_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;               // rounds to 65536 or more
  if (magnitude < 0x38800000) {                                    // below 2^-14: a multiple of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // whose last bit is 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

template <typename T>
T read(const void* from, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

const Dtype* dtype_named(std::string_view name) {
  for (const Dtype& dtype : kDtypes)
    if (name == dtype.name) return &dtype;
  return nullptr;
}

const Dtype* dtype_of_code(std::string_view code) {
  for (const Dtype& dtype : kDtypes)
    if (code == dtype.code) return &dtype;
  return nullptr;
}

void convert(const void* from, const Dtype& from_dtype, void* to, const Dtype& to_dtype, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float value = from_dtype.number == METALCORE_FLOAT32   ? read<float>(from, i)
                        : from_dtype.number == METALCORE_FLOAT16 ? float_of_half(read<uint16_t>(from, i))
                                                                 : float_of_bfloat16(read<uint16_t>(from, i));
    char* const place = static_cast<char*>(to) + i * to_dtype.size;
    if (to_dtype.number == METALCORE_FLOAT32) {
      std::memcpy(place, &value, sizeof value);
    } else {
      const uint16_t bits = to_dtype.number == METALCORE_FLOAT16 ? half_of(value) : bfloat16_of(value);
      std::memcpy(place, &bits, sizeof bits);
    }
  }
}

namespace {

constexpr uint64_t kMostHeader = 100'000'000;  // bytes, as in the format's own reader
constexpr size_t kMostDimensions = 64, kBlock = 1 << 20, kDigits = 64;
constexpr int64_t kMostSize = int64_t{1} << 48;
constexpr std::string_view kLead = "{\"__metadata__\":{\"digest\":\"";  // in front of the digest

// The size of each dtype that the format has. Programs have those of kDtypes.
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
