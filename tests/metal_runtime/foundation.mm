// Reference counting, and the classes of Foundation that the backend uses.
#import "runtime.h"

#import <objc/runtime.h>

#include <vector>

static void add_to_pool(id object);

@implementation NSObject
+ (instancetype)alloc {
  NSObject* object = class_createInstance((Class)self, 0);
  object->references_ = 1;
  return object;
}
- (instancetype)init {
  return self;
}
- (void)dealloc {
  object_dispose(self);
}
- (instancetype)retain {
  __atomic_add_fetch(&references_, 1, __ATOMIC_RELAXED);
  return self;
}
- (void)release {
  metalcore::metal_runtime::require(references_ > 0, "an object is released that is gone");
  if (__atomic_sub_fetch(&references_, 1, __ATOMIC_ACQ_REL) == 0) [self dealloc];
}
- (instancetype)autorelease {
  add_to_pool(self);
  return self;
}
- (BOOL)respondsToSelector:(SEL)selector {
  return class_respondsToSelector(object_getClass(self), selector);
}
@end

// @autoreleasepool makes one of these on this runtime.
@interface NSAutoreleasePool : NSObject {
  std::vector<id>* objects_;
  NSAutoreleasePool* outer_;
}
- (void)add:(id)object;
- (void)drain;
@end

static thread_local NSAutoreleasePool* innermost_pool = nil;

static void add_to_pool(id object) {
  metalcore::metal_runtime::require(innermost_pool != nil, "an object is autoreleased outside of a pool, and leaks");
  [innermost_pool add:object];
}

@implementation NSAutoreleasePool
- (instancetype)init {
  objects_ = new std::vector<id>;
  outer_ = innermost_pool;
  innermost_pool = self;
  return self;
}
- (void)add:(id)object {
  objects_->push_back(object);
}
- (void)drain {
  innermost_pool = outer_;
  for (id object : *objects_) [object release];
  delete objects_;
  [self release];
}
@end

@interface RuntimeString : NSString {
 @public
  std::string* content;
}
@end

@implementation NSString
+ (instancetype)stringWithCString:(const char*)text encoding:(NSStringEncoding)encoding {
  metalcore::metal_runtime::require(encoding == NSUTF8StringEncoding, "a string in another encoding than UTF-8");
  return metalcore::metal_runtime::string(text);
}
- (const char*)UTF8String {
  return static_cast<RuntimeString*>(self)->content->c_str();
}
@end

@implementation RuntimeString
- (void)dealloc {
  delete content;
  [super dealloc];
}
@end

@interface RuntimeError : NSError {
 @public
  std::string* description;
}
@end

@implementation NSError
- (NSString*)localizedDescription {
  return metalcore::metal_runtime::string(*static_cast<RuntimeError*>(self)->description);
}
@end

@implementation RuntimeError
- (void)dealloc {
  delete description;
  [super dealloc];
}
@end

@interface RuntimeArray : NSArray {
 @public
  id only;
}
@end

@implementation NSArray
- (NSUInteger)count {
  return static_cast<RuntimeArray*>(self)->only ? 1 : 0;
}
- (id)objectAtIndex:(NSUInteger)index {
  metalcore::metal_runtime::require(index < self.count, "an index beyond the end of an array");
  return static_cast<RuntimeArray*>(self)->only;
}
@end

@implementation RuntimeArray
@end

@interface RuntimeURL : NSURL {
 @public
  std::string* path;
}
@end

@implementation NSURL
+ (NSURL*)fileURLWithPath:(NSString*)path {
  RuntimeURL* url = [[[RuntimeURL alloc] init] autorelease];
  url->path = new std::string(path.UTF8String);
  return url;
}
@end

@implementation RuntimeURL
- (void)dealloc {
  delete path;
  [super dealloc];
}
@end

namespace metalcore::metal_runtime {

NSString* string(const std::string& text) {
  RuntimeString* made = [[[RuntimeString alloc] init] autorelease];
  made->content = new std::string(text);
  return made;
}

NSError* error(const std::string& description) {
  RuntimeError* made = [[[RuntimeError alloc] init] autorelease];
  made->description = new std::string(description);
  return made;
}

NSArray* array(id only) {
  RuntimeArray* made = [[RuntimeArray alloc] init];
  made->only = only;
  return made;
}

std::string text(NSString* string) { return string.UTF8String; }
std::string path(NSURL* url) { return *static_cast<RuntimeURL*>(url)->path; }

}  // namespace metalcore::metal_runtime
