// The part of Foundation that csrc/backends/mps uses, declared anew for builds without Apple's SDK. declarations.py
// compares every line of it with Apple's own metadata.
#pragma once

#include <MacTypes.h>  // as Apple's does: what collides with it there collides here
#include <stddef.h>
#include <stdint.h>

#import <objc/NSObject.h>
#import <objc/objc.h>

#define NS_ENUM(type, name) enum name : type name; enum name : type
#define NS_OPTIONS(type, name) type name; enum : name
#define NS_RETURNS_RETAINED __attribute__((ns_returns_retained))

#pragma clang assume_nonnull begin

typedef NSUInteger NSStringEncoding;
enum : NSStringEncoding { NSUTF8StringEncoding = 4 };

@interface NSString : NSObject
@property(nullable, readonly) const char* UTF8String;
+ (nullable instancetype)stringWithCString:(const char*)text encoding:(NSStringEncoding)encoding;
@end

@interface NSError : NSObject
@property(readonly, copy) NSString* localizedDescription;
@end

@interface NSArray : NSObject
@property(readonly) NSUInteger count;
- (id)objectAtIndex:(NSUInteger)index;
@end

@interface NSURL : NSObject
+ (NSURL*)fileURLWithPath:(NSString*)path;
@end

#pragma clang assume_nonnull end
