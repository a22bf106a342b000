"""MSL as text: preprocessed, parsed, and translated to the C++ that a CPU or NVRTC compiles."""
