// Autorelease pools, which C++ exceptions do not close.
#pragma once

#import <Foundation/Foundation.h>

#include <exception>

namespace metalcore::c_api {

// Calls `body` in a pool of its own, and throws what it throws behind the pool's end. A C program's threads have none.
template <typename Body>
void in_pool(const Body& body) {
  std::exception_ptr failure;
  @autoreleasepool {
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace metalcore::c_api
