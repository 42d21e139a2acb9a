// A writable copy of a file that nobody else can find: it has no name by the time the constructor returns, so it is gone
// when the process is, however that ends.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace moestream {

// What to do where a copy has no room, after what is lacking.
inline constexpr const char* kElsewhere = ": free some space or set XDG_CACHE_HOME to another disk";

// Makes the directory (and its parents) and throws Error(refused) with what is lacking when its file system has not that
// many bytes free, and some to spare.
void require_room(const std::string& directory, uint64_t bytes);

class FileCopy {
  public:
    // `path` names the source in errors; `progress` is told the bytes copied so far. A reflink where the file system can,
    // else every byte is copied, and neither file is left in the page cache. Throws Error(refused), Error(io).
    FileCopy(int source, uint64_t bytes, const std::string& path, const std::string& directory,
             const std::function<void(uint64_t)>& progress);
    ~FileCopy();
    FileCopy(FileCopy&& other) noexcept;
    FileCopy(const FileCopy&) = delete;
    FileCopy& operator=(const FileCopy&) = delete;

    int fd() const { return fd_; }
    uint64_t bytes() const { return bytes_; }
    bool reflinked() const { return reflinked_; }

  private:
    void copy(int source, const std::string& path, const std::function<void(uint64_t)>& progress) const;

    int fd_ = -1;
    uint64_t bytes_ = 0;
    bool reflinked_ = false;
};

}  // namespace moestream
