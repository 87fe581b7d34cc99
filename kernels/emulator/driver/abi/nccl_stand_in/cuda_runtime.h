// What nccl.h needs of CUDA's runtime, whose headers come with toolkits only.
#pragma once
#include <cstddef>
#include <cstdint>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
