// While a model loads, llama.cpp asks the kernel to map each shard. These functions let a store answer instead.
//
// The import slots of mmap, munmap and posix_madvise in libllama are pointed at functions of this file, once a
// process; they pass everything through except
//   - mmap of a registered shard (same device and inode) by the thread that holds a LoadScope, which gets the region
//     the scope's owner hands out, and
//   - munmap and posix_madvise inside such a region: the region belongs to its owner, not to llama.cpp.
// So other models, other threads and other users of libllama see the plain system calls.
#pragma once
#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace moestream {

// Points the slots at us. False when libllama has no such slots (statically linked, other platform): the caller maps
// over llama.cpp's own mapping after the load. Idempotent; thread-safe.
bool install_slots(const std::string& libllama_path);

class LoadScope {
  public:
    struct File {
        dev_t device = 0;
        ino_t inode = 0;
    };
    // `region(shard)` is called for an intercepted mmap and returns the address to give to llama.cpp.
    LoadScope(std::vector<File> files, std::function<void*(uint32_t shard)> region);
    ~LoadScope();
    LoadScope(const LoadScope&) = delete;
    LoadScope& operator=(const LoadScope&) = delete;
    const std::vector<bool>& answered() const { return answered_; }

  private:
    friend struct SlotFunctions;
    std::vector<File> files_;
    std::function<void*(uint32_t)> region_;
    std::vector<bool> answered_;
};

// A file's bytes [begin, end) in this process, at base + begin. llama.cpp unmaps what lies outside its tensors.
struct Mapping {
    char* base = nullptr;
    uint64_t begin = 0;
    uint64_t end = 0;
};
// Every mapping of the file that is not one of our regions: for a llama.cpp without import slots.
std::vector<Mapping> find_mappings(const LoadScope::File& file);

// Regions whose munmap and posix_madvise are ours. `forget_region` before the owner unmaps.
void register_region(void* base, size_t bytes);
void forget_region(void* base);

}  // namespace moestream
