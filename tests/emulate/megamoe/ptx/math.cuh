#pragma once
#include "megamoe/ptx/types.cuh"
