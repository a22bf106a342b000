// Variables of the environment that switch a mode on or off.
#pragma once

namespace metalcore::simulator {

// Whether a variable switches its mode on: 1, on, yes and true do, in any case. 0, off, no, false, nothing and no
// variable do not. Throws std::invalid_argument for another text. metalcore/_core/switches.py is the same in Python.
bool switched_on(const char* variable);

}  // namespace metalcore::simulator
