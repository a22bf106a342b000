// The worker threads. One job at a time uses them, and the thread that brings a job works on it too. Where another job
// has the workers (several Python threads dispatch at once), that thread does all of its job itself.
#pragma once

#include <cstdint>
#include <functional>

namespace metalcore::simulator {

// The threads that a job may use, the caller's included. By default they are OMP_NUM_THREADS, or else as many as the
// CPUs that this process may run on.
uint32_t num_threads();
void set_num_threads(uint32_t count);

// Calls task(claim) on one or more threads; each call takes pieces of [0, count) until claim returns false. Pieces are
// handed out in ascending order. Returns when all pieces are done. After an exception no further piece is handed out,
// and the first exception is thrown. `wide` says that the job is worth waking threads for at once.
class Claim {
 public:
  virtual ~Claim() = default;
  virtual bool operator()(uint64_t& begin, uint64_t& end) = 0;
};
void parallel(uint64_t count, uint64_t piece, bool wide, const std::function<void(Claim&)>& task);

}  // namespace metalcore::simulator
