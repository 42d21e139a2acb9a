// shared: write in place. The mapping is shared and writable, and of a *copy* of the file that is made at load and has no
// name by the time it is used, so that nothing remains of it whatever happens. The user's file is only ever read. Every
// page that is written becomes dirty, and the kernel writes it back to the copy: that is what this store is here to show.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "copying.h"
#include "moestream/interpose.h"

namespace moestream {
namespace {

constexpr size_t kCopyRequest = size_t{8} << 20;
constexpr uint64_t kSpare = uint64_t{64} << 20;  // of disk, left free

class SharedStore : public CopyingStore {
  public:
    using CopyingStore::CopyingStore;
    ~SharedStore() override {
        for (const int fd : copies_) close(fd);
    }

    void* region(uint32_t shard) override {
        auto& region = regions_[shard];
        if (region.base != nullptr) return region.base;
        const int fd = copy_of(shard);
        void* base = mmap(nullptr, region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) {
            throw Error(ErrorKind::refused, "the copy in " + options_.copy_dir + " cannot be mapped: " +
                                                std::strerror(errno));
        }
        region.base = static_cast<char*>(base);
        register_region(region.base, region.bytes);
        return base;
    }
    std::map<std::string, uint64_t> engagement() const override {
        auto counts = CopyingStore::engagement();
        counts["bytes of the file's copy"] = copied_bytes_;
        counts["reflinks"] = reflinks_;
        return counts;
    }

  private:
    [[noreturn]] void refuse(const std::string& what, int error) const {
        throw Error(ErrorKind::refused, "the copy for store shared in " + options_.copy_dir + ": " + what + " (" +
                                            std::strerror(error) + ")");
    }

    int copy_of(uint32_t shard) {
        mkdir(options_.copy_dir.c_str(), 0777);  // an existing one is what is wanted; another failure shows in open
        const int fd = open(options_.copy_dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        if (fd < 0) refuse("no file without a name can be made there: set XDG_CACHE_HOME to a local disk", errno);
        copies_.push_back(fd);
        const auto& region = regions_[shard];
        if (ioctl(fd, FICLONE, region.buffered_fd) == 0) {
            ++reflinks_;
        } else {
            write_copy(fd, shard);
        }
        copied_bytes_ += region.bytes;
        return fd;
    }

    void write_copy(int fd, uint32_t shard) {
        const auto& region = regions_[shard];
        struct statvfs space {};
        if (fstatvfs(fd, &space) != 0) refuse("its free space is not known", errno);
        const uint64_t room = uint64_t{space.f_bavail} * space.f_frsize;
        if (room < region.bytes + kSpare) {
            throw Error(ErrorKind::refused, "store shared needs a copy of " + std::to_string(region.bytes) +
                                                " bytes and " + options_.copy_dir + " has room for " +
                                                std::to_string(room) + ": free some or set XDG_CACHE_HOME elsewhere");
        }
        std::vector<char> buffer(kCopyRequest);
        for (uint64_t at = 0; at < region.bytes;) {
            const size_t want = std::min<uint64_t>(kCopyRequest, region.bytes - at);
            const ssize_t got = pread(region.buffered_fd, buffer.data(), want, static_cast<off_t>(at));
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) refuse("the model cannot be read", got == 0 ? ENODATA : errno);
            for (ssize_t put = 0; put < got;) {
                const ssize_t wrote = pwrite(fd, buffer.data() + put, static_cast<size_t>(got - put),
                                             static_cast<off_t>(at) + put);
                if (wrote < 0 && errno == EINTR) continue;
                if (wrote <= 0) refuse("it cannot be written", wrote == 0 ? ENOSPC : errno);
                put += wrote;
            }
            // Neither the file nor its copy is to fill the memory that a cap leaves.
            if (fdatasync(fd) != 0) refuse("it cannot be written", errno);
            posix_fadvise(fd, static_cast<off_t>(at), got, POSIX_FADV_DONTNEED);
            posix_fadvise(region.buffered_fd, static_cast<off_t>(at), got, POSIX_FADV_DONTNEED);
            at += static_cast<uint64_t>(got);
            if (options_.progress) options_.progress(at, region.bytes);
        }
    }

    std::vector<int> copies_;
    uint64_t copied_bytes_ = 0, reflinks_ = 0;
};

const StoreRegistration registration(
    "shared", "reads written into a shared mapping of a copy of the file",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<SharedStore>(index, options);
    });

}  // namespace
}  // namespace moestream
