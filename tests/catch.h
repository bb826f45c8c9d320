#pragma once

// Catch2 2 (Debian 12) or 3 (Debian 13), one include for both.
#ifdef GRADWIRE_CATCH2_V3
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
