#include "common.h"
#include "products.h"
#include "attention.h"
