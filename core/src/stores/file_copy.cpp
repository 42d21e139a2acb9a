#include "file_copy.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "moestream/error.h"

namespace moestream {
namespace {

constexpr size_t kRequest = size_t{8} << 20;
constexpr uint64_t kSpare = uint64_t{64} << 20;  // of disk, left free

[[noreturn]] void refuse(const std::string& what, int error) {
    throw Error(ErrorKind::refused, "store shared: " + what + " (" + std::strerror(error) + ")" + kElsewhere);
}

int nameless_file(const std::string& directory) {
    int fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0) return fd;
    // Not every file system has files without a name: there it loses its name at once.
    std::string path = directory + "/shared-XXXXXX";
    fd = mkostemp(path.data(), O_CLOEXEC);
    if (fd < 0) refuse("no file can be made in " + directory, errno);
    unlink(path.c_str());
    return fd;
}

void write_all(int fd, const char* from, size_t bytes, uint64_t at) {
    for (size_t put = 0; put < bytes;) {
        const ssize_t wrote = pwrite(fd, from + put, bytes - put, static_cast<off_t>(at + put));
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) refuse("the copy of the model cannot be written", wrote == 0 ? ENOSPC : errno);
        put += static_cast<size_t>(wrote);
    }
}

}  // namespace

void require_room(const std::string& directory, uint64_t bytes) {
    std::error_code error;
    std::filesystem::create_directories(directory, error);
    if (error) refuse(directory + " cannot be made", error.value());
    struct statvfs space {};
    if (statvfs(directory.c_str(), &space) != 0) refuse("the free space of " + directory + " is not known", errno);
    const uint64_t room = uint64_t{space.f_bavail} * space.f_frsize;
    if (room >= kSpare && room - kSpare >= bytes) return;
    throw Error(ErrorKind::refused, "store shared works on a copy of the model, " + std::to_string(bytes / 1000000) +
                                        " MB, and " + directory + " has room for " +
                                        std::to_string((room - std::min(room, kSpare)) / 1000000) + " MB" + kElsewhere);
}

FileCopy::FileCopy(int source, uint64_t bytes, const std::string& path, const std::string& directory,
                   const std::function<void(uint64_t)>& progress)
    : fd_(nameless_file(directory)), bytes_(bytes) {
    try {
        reflinked_ = ioctl(fd_, FICLONE, source) == 0;
        if (!reflinked_) copy(source, path, progress);
    } catch (...) {
        close(fd_);
        throw;
    }
}

FileCopy::~FileCopy() {
    if (fd_ >= 0) close(fd_);
}

FileCopy::FileCopy(FileCopy&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_), reflinked_(other.reflinked_) {}

void FileCopy::copy(int source, const std::string& path, const std::function<void(uint64_t)>& progress) const {
    std::vector<char> buffer(kRequest);
    for (uint64_t at = 0; at < bytes_;) {
        const size_t want = std::min<uint64_t>(kRequest, bytes_ - at);
        const ssize_t got = pread(source, buffer.data(), want, static_cast<off_t>(at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            throw Error(ErrorKind::io, path + " at byte " + std::to_string(at) + ": " +
                                           (got == 0 ? "the file ends early" : std::strerror(errno)));
        }
        write_all(fd_, buffer.data(), static_cast<size_t>(got), at);
        // Neither the file nor its copy is to fill the memory that a cap leaves.
        if (fdatasync(fd_) != 0) refuse("the copy of the model cannot be written", errno);
        for (const int fd : {fd_, source}) {
            const int error = posix_fadvise(fd, static_cast<off_t>(at), got, POSIX_FADV_DONTNEED);
            if (error != 0) refuse("what is copied of the model stays in the page cache", error);
        }
        at += static_cast<uint64_t>(got);
        progress(at);
    }
}

}  // namespace moestream
