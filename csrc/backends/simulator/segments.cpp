#include "segments.h"

#include <link.h>

namespace metalcore::simulator {

Segments::Segments(const void* symbol) {
  struct Search {
    uintptr_t symbol;
    Segments* segments;
  } search{reinterpret_cast<uintptr_t>(symbol), this};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        bool found = false;
        std::vector<Range> ranges;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
          found |= search.symbol >= begin && search.symbol < end;
          ranges.push_back(
              {reinterpret_cast<const char*>(begin), reinterpret_cast<const char*>(end), (header.p_flags & PF_X) != 0});
        }
        if (!found) return 0;
        search.segments->ranges_ = std::move(ranges);
        search.segments->base_ = reinterpret_cast<const char*>(info->dlpi_addr);
        return 1;
      },
      &search);
}

bool Segments::contain(const char* address, size_t size) const {
  for (const Range& range : ranges_)
    if (address >= range.begin && address + size <= range.end) return true;
  return false;
}

bool Segments::is_code(const char* address) const {
  for (const Range& range : ranges_)
    if (range.code && address >= range.begin && address < range.end) return true;
  return false;
}

}  // namespace metalcore::simulator
