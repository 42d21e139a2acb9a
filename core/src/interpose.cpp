#include "moestream/interpose.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string_view>

namespace moestream {
namespace {

thread_local LoadScope* t_scope = nullptr;

struct Regions {
    std::mutex mutex;
    std::map<char*, size_t> by_base;
    bool contains(void* address) {
        const std::lock_guard lock(mutex);
        auto* byte = static_cast<char*>(address);
        auto it = by_base.upper_bound(byte);
        if (it == by_base.begin()) return false;
        --it;
        return byte < it->first + it->second;
    }
};

// Never destroyed: llama.cpp may unmap from destructors that run after ours.
Regions& regions() {
    static auto* const instance = new Regions;
    return *instance;
}

}  // namespace

struct SlotFunctions {
    static void* map(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
        struct stat status {};
        if (t_scope != nullptr && fd >= 0 && offset == 0 && fstat(fd, &status) == 0) {
            for (uint32_t shard = 0; shard < t_scope->files_.size(); ++shard) {
                const auto& file = t_scope->files_[shard];
                if (file.device != status.st_dev || file.inode != status.st_ino) continue;
                t_scope->answered_[shard] = true;
                return t_scope->region_(shard);
            }
        }
        return ::mmap(address, bytes, protection, flags, fd, offset);
    }
    static int unmap(void* address, size_t bytes) {
        return regions().contains(address) ? 0 : ::munmap(address, bytes);
    }
    static int advise(void* address, size_t bytes, int advice) {
        return regions().contains(address) ? 0 : ::posix_madvise(address, bytes, advice);
    }
};

namespace {

#if defined(__x86_64__)
constexpr bool is_slot(uint64_t type) { return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT; }
#elif defined(__aarch64__)
constexpr bool is_slot(uint64_t type) { return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT; }
#else
constexpr bool is_slot(uint64_t) { return false; }
#endif

void* replacement(std::string_view name) {
    if (name == "mmap" || name == "mmap64") return reinterpret_cast<void*>(&SlotFunctions::map);
    if (name == "munmap") return reinterpret_cast<void*>(&SlotFunctions::unmap);
    if (name == "posix_madvise") return reinterpret_cast<void*>(&SlotFunctions::advise);
    return nullptr;
}

struct Object {
    ElfW(Addr) base = 0;
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    const ElfW(Rela)* tables[2] = {nullptr, nullptr};
    size_t sizes[2] = {0, 0};
};

Object describe(const dl_phdr_info& info) {
    Object object;
    object.base = info.dlpi_addr;
    const ElfW(Dyn)* dynamic = nullptr;
    for (int i = 0; i < info.dlpi_phnum; ++i) {
        if (info.dlpi_phdr[i].p_type == PT_DYNAMIC) {
            dynamic = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
        }
    }
    for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) {
        const auto pointer = dynamic->d_un.d_ptr;
        switch (dynamic->d_tag) {
            case DT_SYMTAB: object.symbols = reinterpret_cast<const ElfW(Sym)*>(pointer); break;
            case DT_STRTAB: object.names = reinterpret_cast<const char*>(pointer); break;
            case DT_JMPREL: object.tables[0] = reinterpret_cast<const ElfW(Rela)*>(pointer); break;
            case DT_PLTRELSZ: object.sizes[0] = dynamic->d_un.d_val; break;
            case DT_RELA: object.tables[1] = reinterpret_cast<const ElfW(Rela)*>(pointer); break;
            case DT_RELASZ: object.sizes[1] = dynamic->d_un.d_val; break;
            default: break;
        }
    }
    return object;
}

// The slot's page may be read-only after relocation (RELRO): opened for the write, then left readable and writable,
// which is what a lazily bound slot is anyway.
bool write_slot(void** slot, void* value) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    auto* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) & ~(page - 1));
    if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(slot, value, __ATOMIC_SEQ_CST);
    return true;
}

bool patch(const Object& object) {
    bool mapped = false;
    bool unmapped = false;
    if (object.symbols == nullptr || object.names == nullptr) return false;
    for (int table = 0; table < 2; ++table) {
        const size_t count = object.tables[table] == nullptr ? 0 : object.sizes[table] / sizeof(ElfW(Rela));
        for (size_t i = 0; i < count; ++i) {
            const auto& relocation = object.tables[table][i];
            if (!is_slot(ELF64_R_TYPE(relocation.r_info))) continue;
            const char* name = object.names + object.symbols[ELF64_R_SYM(relocation.r_info)].st_name;
            void* function = replacement(name);
            if (function == nullptr) continue;
            if (!write_slot(reinterpret_cast<void**>(object.base + relocation.r_offset), function)) return false;
            mapped |= std::string_view(name).starts_with("mmap");
            unmapped |= std::string_view(name) == "munmap";
        }
    }
    return mapped && unmapped;
}

struct Search {
    std::string path;
    bool found = false;
};

int visit(dl_phdr_info* info, size_t, void* data) {
    auto& search = *static_cast<Search*>(data);
    if (info->dlpi_name == nullptr || search.path != info->dlpi_name) return 0;
    search.found = patch(describe(*info));
    return 1;
}

}  // namespace

bool install_slots(const std::string& libllama_path) {
    static std::mutex mutex;
    static std::map<std::string, bool> done;
    const std::lock_guard lock(mutex);
    const auto it = done.find(libllama_path);
    if (it != done.end()) return it->second;
    Search search{libllama_path, false};
    // dl_iterate_phdr names an object by the path it was opened with; ask the loader which that is.
    if (void* handle = dlopen(libllama_path.c_str(), RTLD_LAZY | RTLD_NOLOAD); handle != nullptr) {
        link_map* map = nullptr;
        if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) search.path = map->l_name;
        dlclose(handle);
    }
    dl_iterate_phdr(&visit, &search);
    done[libllama_path] = search.found;
    return search.found;
}

LoadScope::LoadScope(std::vector<File> files, std::function<void*(uint32_t)> region)
    : files_(std::move(files)), region_(std::move(region)), answered_(files_.size(), false) {
    t_scope = this;
}

LoadScope::~LoadScope() { t_scope = nullptr; }

std::vector<Mapping> find_mappings(const LoadScope::File& file) {
    std::ifstream maps("/proc/self/maps");
    std::vector<Mapping> found;
    for (std::string line; std::getline(maps, line);) {
        unsigned long long begin = 0;
        unsigned long long end = 0;
        unsigned long long offset = 0;
        unsigned major = 0;
        unsigned minor = 0;
        unsigned long long inode = 0;
        if (std::sscanf(line.c_str(), "%llx-%llx %*s %llx %x:%x %llu", &begin, &end, &offset, &major, &minor,
                        &inode) != 6) {
            continue;
        }
        auto* address = reinterpret_cast<char*>(static_cast<uintptr_t>(begin));
        if (inode != file.inode || makedev(major, minor) != file.device || regions().contains(address)) continue;
        found.push_back({address - offset, offset, offset + (end - begin)});
    }
    return found;
}

void register_region(void* base, size_t bytes) {
    const std::lock_guard lock(regions().mutex);
    regions().by_base[static_cast<char*>(base)] = bytes;
}

void forget_region(void* base) {
    const std::lock_guard lock(regions().mutex);
    regions().by_base.erase(static_cast<char*>(base));
}

}  // namespace moestream
