// Python's signals during long dispatches: Python's handlers run only where its main thread asks for them.
#pragma once

#include <cstdint>

namespace metalcore::simulator {

// Runs the handlers that are due. Python's main thread calls it, with or without the GIL. Throws Interrupted where a
// handler raises.
void run_python_handlers();

// Begins or ends to listen to SIGINT before Python does. It serves dispatches on other threads than the main one, which
// may be waiting for them in C++. Only one thread calls this.
void listen_to_interrupts(bool on);
// How often SIGINT has come while it was listened to.
uint32_t interrupts();
// Whether SIGINT raises KeyboardInterrupt on the main thread: Python's own handler is in place, or Python is ending.
bool interrupts_raise();
// Makes the end of Python known here: threads without the GIL cannot ask for it. Needs the GIL; one call is enough.
void note_end_of_python();

}  // namespace metalcore::simulator
