// Address space and physical pages: the few system calls the stores are made of.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace moestream {

// Address space without memory behind it: anonymous, NORESERVE, kept out of forks, core dumps and huge pages.
// `fixed` non-null: laid over exactly that place. `closed`: nothing may be touched until it is opened. Throws
// Error(refused).
char* reserve(size_t bytes, size_t alignment, void* fixed = nullptr, bool closed = false);
// Reserves again what has no mapping, so that it is nobody else's. 0 or errno: EEXIST for what has one, which stays.
int map_again(char* at, size_t bytes, bool closed);

// What lets a process map more, where the kernel says ENOMEM and does not say why: its limits may have been lowered
// since they were looked at.
std::string mappings_remedy();
void release(void* base, size_t bytes);

// The movable pages of the budget. Taken at start as 2 MiB pages where the kernel has them, so that a frame is
// physically contiguous and a read needs few segments; moving its pages later keeps them so.
class PagePool {
  public:
    PagePool() = default;
    explicit PagePool(size_t bytes);  // populated; throws Error(refused) when the memory is not there
    ~PagePool();
    PagePool(PagePool&& other) noexcept;
    PagePool& operator=(PagePool&& other) noexcept;
    char* base() const { return base_; }
    size_t bytes() const { return bytes_; }

  private:
    char* base_ = nullptr;
    size_t bytes_ = 0;
};

// Moves the pages at `from` to `to`; `from` stays reserved and empty. 0 or errno. `restore`: also give the vacated
// range back its plain mapping, so that it merges with its neighbours and the number of mappings stays bounded.
int move_pages(char* from, char* to, size_t bytes, bool restore);

// '' where this kernel moves pages so, or populates them by MADV_POPULATE_WRITE; else one line that says why not.
std::string move_refused();
std::string populate_refused();

// Raises this process's own limit of locked memory as far as it may.
void raise_lock_limit();

// What may be written is committed where the kernel keeps account of it (vm.overcommit_memory 2), NORESERVE or not: a
// closed range is not, and holds no pages. Whole pages; 0 or errno.
int open_pages(char* at, size_t bytes);
int close_pages(char* at, size_t bytes);

uint64_t now_ns();

}  // namespace moestream
