// The part of libdispatch that the backend uses; see stream.mm.
#pragma once

typedef struct dispatch_queue_s* dispatch_queue_t;

void dispatch_sync_f(dispatch_queue_t queue, void* context, void (*work)(void*));
