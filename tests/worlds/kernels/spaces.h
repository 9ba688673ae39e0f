// What our kernels use of Metal, for clang as a compiler of OpenCL C++: its address spaces are Metal's by other names.
// It knows no bfloat16, which is a number of 16 bits here; `metal.h` checks what is converted to it.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
typedef uint uint32_t;
typedef int int32_t;
typedef uchar uint8_t;
typedef half float16_t;
typedef short bfloat16_t;
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_shuffle_xor(float, ushort);
namespace metal {
float exp(float);
float exp2(float);
float fma(float, float, float);
float max(float, float);
float min(float, float);
float fabs(float);
float rint(float);
namespace precise { float rsqrt(float); float tanh(float); }
namespace fast { float cos(float); float sin(float); }
}
