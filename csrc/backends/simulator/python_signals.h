// Signals as Python sees them, for dispatches that last: Python's own handlers run only where its main thread asks.
#pragma once

#include <cstdint>

namespace metalcore::simulator {

// Runs the handlers that are due; on Python's main thread, with or without the GIL. Throws Interrupted where one
// raises.
void run_python_handlers();

// For dispatches on other threads, while the main one may be waiting for them in C++. Listens to SIGINT before Python
// does, or no more. One thread calls this.
void listen_to_interrupts(bool on);
// How often SIGINT has come while it was listened to.
uint32_t interrupts();
// Whether it raises KeyboardInterrupt on the main thread: Python's own handler is in place, or Python is ending.
bool interrupts_raise();
// Makes the end of Python known here, which threads without the GIL cannot ask for. With the GIL; once is enough.
void note_end_of_python();

}  // namespace metalcore::simulator
