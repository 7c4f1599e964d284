# CMake toolchain of wheels/build.py: zig compiles and links, for glibc 2.28. ZIG is the path of its executable.
set(CMAKE_CXX_COMPILER $ENV{ZIG} c++ -target x86_64-linux-gnu.2.28)
# cstdio: nanobind counts on headers that libc++ does not include. mcrc32: zig denies what target("sse4.2") includes.
# idirafter: Debian's Python keeps its pyconfig.h there.
set(CMAKE_CXX_FLAGS_INIT "-include cstdio -mcrc32 -idirafter /usr/include")
set(CMAKE_CXX_ARCHIVE_CREATE "$ENV{ZIG} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "$ENV{ZIG} ranlib <TARGET>")
set(CMAKE_CXX_SCAN_FOR_MODULES OFF) # zig has no scanner
