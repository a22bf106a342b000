// The root class, on GCC's Objective-C runtime; see foundation.mm.
#pragma once

#include <stdint.h>

#import <objc/objc.h>

typedef unsigned long NSUInteger;
typedef long NSInteger;

@protocol NSObject
- (instancetype)retain;
- (void)release;
- (instancetype)autorelease;
- (BOOL)respondsToSelector:(SEL)selector;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
  NSUInteger references_;
}
+ (instancetype)alloc;
- (instancetype)init;
- (void)dealloc;
@end
