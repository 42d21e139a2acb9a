// Counts what a test allocates. Include it in one file of a test only: it replaces the program's operator new.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>

static size_t allocations = 0;

void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    ++allocations;
    return std::malloc(bytes);
}
void* operator new(size_t bytes) {
    if (void* p = operator new(bytes, std::nothrow)) return p;
    throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
