// The worker threads. One job at a time uses them; the thread that brings a job works on it too, and when the workers
// are taken (several Python threads dispatch at once) it does all of its job itself.
#pragma once

#include <cstdint>
#include <functional>

namespace metalcore::simulator {

// Threads that a job may use, the caller's included. At first OMP_NUM_THREADS, else the CPUs this process may run on.
uint32_t num_threads();
void set_num_threads(uint32_t count);

// Calls task(claim) on one or more threads; each call takes pieces of [0, count) until claim returns false. Returns
// when all is done; throws the first exception of a task, after which no further piece is handed out. Pieces are handed
// out in ascending order. `wide` says that the job is worth waking threads for at once.
class Claim {
 public:
  virtual ~Claim() = default;
  virtual bool operator()(uint64_t& begin, uint64_t& end) = 0;
};
void parallel(uint64_t count, uint64_t piece, bool wide, const std::function<void(Claim&)>& task);

}  // namespace metalcore::simulator
