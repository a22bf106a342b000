// Constants of the search for failures in the infos of a batch, shared with the host.
#pragma once

// The number of infos that a threadgroup reads.
#define INFO_BLOCK 4096
#define INFO_THREADS 1024  // at most
