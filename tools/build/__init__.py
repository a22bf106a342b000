"""What setup.py does: the ops' extension, the built-in kernels for each platform, and the simulated device."""
