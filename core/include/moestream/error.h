// The one exception type of the core. Nothing is thrown across a C callback: the hook keeps the first error and
// the decode is aborted (see hook.h).
#pragma once
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moestream {

enum class ErrorKind {
    usage,        // the caller's words are wrong: a name, an argument
    refused,      // this box or this model cannot do what was asked; the text names the remedy
    unsupported,  // the kernel or file system lacks a feature (io_uring, O_DIRECT, mlock): a fallback may exist
    io,           // a read failed; the text names shard, offset, tensor
    abi,          // llama.cpp's structures are not the ones this version was proven with
    internal      // a broken invariant of our own
};

class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind(kind) {}
    ErrorKind kind;
};

// Why a file cannot be opened, with the remedy where there is one.
inline std::string why_not_opened(int error) {
    return std::strerror(error) + std::string(error == EMFILE ? ": raise `ulimit -n`" : "");
}

}  // namespace moestream
