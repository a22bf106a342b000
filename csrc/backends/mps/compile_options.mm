#import "pipelines.h"

#import <Foundation/Foundation.h>

// The properties that MTLCompileOptions has since macOS 15, where they replace fastMathEnabled. They are declared here
// because an older SDK has them not. tools/mac_check compares them, and the values below, with Apple's.
@protocol MTLCompileOptionsSince15
- (void)setMathMode:(NSInteger)mode;
- (void)setMathFloatingPointFunctions:(NSInteger)functions;
@end

namespace metalcore::mps {

namespace {

constexpr NSInteger kMTLMathModeSafe = 0;
constexpr NSInteger kMTLMathFloatingPointFunctionsPrecise = 1;

}  // namespace

// Functions that a kernel names, such as fast::exp, are those. All others are the precise ones.
MTLCompileOptions* compile_options() {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  options.languageVersion = MTLLanguageVersion3_1;
  if ([options respondsToSelector:@selector(setMathMode:)]) {
    id<MTLCompileOptionsSince15> newer = static_cast<id>(options);
    [newer setMathMode:kMTLMathModeSafe];
    [newer setMathFloatingPointFunctions:kMTLMathFloatingPointFunctionsPrecise];
  } else {
    options.fastMathEnabled = NO;
  }
  return options;
}

}  // namespace metalcore::mps
