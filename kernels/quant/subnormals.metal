// Whether this GPU keeps subnormal float16, which formats.h counts on: the host's 1 becomes 2, or else 0.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void half_subnormals(device uint* smallest [[buffer(0)]]) {
  const half number = as_type<half>(ushort(smallest[0]));
  smallest[0] = static_cast<uint>(static_cast<float>(number) * 0x1p25f);
}
