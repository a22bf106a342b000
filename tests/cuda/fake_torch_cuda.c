// Stands for libtorch_cuda.so: a current stream for every device and thread, as PyTorch has.
static _Thread_local void* streams[16];

void fake_set_stream(int device, void* stream) { streams[device] = stream; }
int aoti_torch_get_current_cuda_stream(int device, void** stream) { return *stream = streams[device], 0; }
