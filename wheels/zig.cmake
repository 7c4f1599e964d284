# CMake toolchain of wheels/build.py: zig compiles and links, for glibc 2.28. ZIG is the path of its executable,
# ZIG_PROCESSOR the processor of the wheel: x86_64 or aarch64.
set(CMAKE_CXX_COMPILER $ENV{ZIG} c++ -target $ENV{ZIG_PROCESSOR}-linux-gnu.2.28)
# cstdio: nanobind counts on headers that libc++ does not include. idirafter: Debian's Python keeps its pyconfig.h there.
set(CMAKE_CXX_FLAGS_INIT "-include cstdio -idirafter /usr/include")
if($ENV{ZIG_PROCESSOR} STREQUAL "x86_64")
  string(APPEND CMAKE_CXX_FLAGS_INIT " -mcrc32") # zig denies what target("sse4.2") includes
else()
  # Debian keeps a pyconfig.h for each processor. Those of 64 bits do not differ in what a module sees.
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/debian)
  file(CREATE_LINK /usr/include/x86_64-linux-gnu ${CMAKE_BINARY_DIR}/debian/$ENV{ZIG_PROCESSOR}-linux-gnu SYMBOLIC)
  string(APPEND CMAKE_CXX_FLAGS_INIT " -idirafter ${CMAKE_BINARY_DIR}/debian")
endif()
set(CMAKE_CXX_ARCHIVE_CREATE "$ENV{ZIG} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "$ENV{ZIG} ranlib <TARGET>")
set(CMAKE_CXX_SCAN_FOR_MODULES OFF) # zig has no scanner
