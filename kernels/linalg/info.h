// What looks for failures among the infos of a batch, shared with the host.
#pragma once

// How many of them a threadgroup looks at.
#define INFO_BLOCK 4096
#define INFO_THREADS 1024  // at most
