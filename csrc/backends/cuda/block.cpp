#include "block.h"

#include <charconv>
#include <stdexcept>

namespace metalcore::cuda {
namespace {

constexpr size_t kFine = 256;  // capacities up to this one are multiples of 16
constexpr uint8_t kFineCodes = kFine / kAlignment;

[[noreturn]] void reject(std::string_view signature) {
  throw std::invalid_argument("metalcore: '" + std::string(signature) + "' is not a signature such as b0,b1,t0,i2:48");
}

}  // namespace

uint8_t capacity_code(size_t size) {
  if (size <= kFine) return static_cast<uint8_t>(size ? aligned(size) / kAlignment : 1);
  uint8_t code = kFineCodes + 1;
  while (capacity_of(code) < size) ++code;
  return code;
}

size_t capacity_of(uint8_t code) { return code <= kFineCodes ? code * kAlignment : kFine << (code - kFineCodes); }

size_t block_size(const Layout& layout) {
  const int addresses = __builtin_popcount(layout.buffers) + __builtin_popcount(layout.threadgroups);
  size_t size = aligned(sizeof(Grid) + sizeof(uint64_t) * static_cast<size_t>(addresses));
  for_each_bit(layout.bytes, [&](uint32_t i) { size += capacity_of(layout.capacity[i]); });
  return size;
}

std::string signature(const Layout& layout) {
  std::string text;
  const auto append = [&](char kind) {
    return [&text, kind](uint32_t i) { text += (text.empty() ? "" : ",") + (kind + std::to_string(i)); };
  };
  for_each_bit(layout.buffers, append('b'));
  for_each_bit(layout.threadgroups, append('t'));
  for_each_bit(layout.bytes, [&](uint32_t i) {
    append('i')(i);
    text += ":" + std::to_string(capacity_of(layout.capacity[i]));
  });
  return text;
}

Layout parse_layout(std::string_view text) {
  Layout layout;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](size_t most) {
    size_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value > most) reject(text);
    at = next;
    return value;
  };
  while (at != end) {
    const char kind = *at++;
    const auto index = static_cast<uint32_t>(number(gpu::kMaximumBuffers - 1));
    uint32_t& mask = kind == 'b' ? layout.buffers : kind == 't' ? layout.threadgroups : layout.bytes;
    if ((kind != 'b' && kind != 't' && kind != 'i') || mask >> index & 1) reject(text);
    mask |= 1u << index;
    if (kind == 'i') {
      if (at == end || *at++ != ':') reject(text);
      const size_t capacity = number(gpu::kMaximumBytes);
      layout.capacity[index] = capacity ? capacity_code(capacity) : 0;
      if (capacity_of(layout.capacity[index]) != capacity) reject(text);
    }
    if (at != end && (*at++ != ',' || at == end)) reject(text);
  }
  if (layout.buffers & layout.bytes) reject(text);
  return layout;
}

}  // namespace metalcore::cuda
