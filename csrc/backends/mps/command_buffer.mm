#import "command_buffer.h"

#include <map>
#include <mutex>

namespace metalcore::mps {

CommandBuffer& command_buffer(const at::mps::MPSStream* stream) {
  static std::mutex mutex;  // each stream has a queue of its own
  static auto& of_streams = *new std::map<const at::mps::MPSStream*, CommandBuffer>;
  const std::lock_guard lock(mutex);
  return of_streams[stream];
}

}  // namespace metalcore::mps
