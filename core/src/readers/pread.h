// The two readers that pread, with the system call as a parameter: tests hand in one that fails.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "moestream/reader.h"
#include "readers/queue.h"

namespace moestream {

using PreadFunction = ssize_t (*)(int fd, void* to, size_t bytes, off_t offset);

// One call for what the piece lacks: bytes or -errno, as Queue::digest takes it.
int64_t pread_once(PreadFunction pread, const Piece& piece);

std::unique_ptr<Reader> make_sync(const ReaderOptions& options, PreadFunction pread);
std::unique_ptr<Reader> make_threads(const ReaderOptions& options, uint32_t threads, PreadFunction pread);

}  // namespace moestream
