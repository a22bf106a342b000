#import "../../../../tools/mac_check/sdk/Foundation.h"
