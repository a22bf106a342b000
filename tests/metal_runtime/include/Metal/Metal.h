#import "../../../../tools/mac_check/sdk/Metal.h"
