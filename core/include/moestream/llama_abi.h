// The one place that knows llama.cpp's ABI. Nothing here is linked: every symbol comes by dlsym from the libraries
// the process has already loaded, and the structure below is proven against them before it is used.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace moestream::abi {

inline constexpr int kMaxDims = 4;
inline constexpr int kMaxSrc = 10;

// ggml_tensor as libggml-base lays it out. `prove` compares each field we read with what ggml's own functions say.
struct Tensor {
    int32_t type;
    void* buffer;
    int64_t ne[kMaxDims];
    size_t nb[kMaxDims];
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    Tensor* src[kMaxSrc];
    Tensor* view_src;
    size_t view_offs;
    void* data;
    char name[64];
    void* extra;
    char padding[8];
};

struct Ops {
    int32_t mul_mat_id = -1;
    int32_t mul_mat = -1;
    int32_t mul = -1;
};

inline constexpr int32_t kTypeF32 = 0;
inline constexpr int32_t kTypeI32 = 26;

// Makes tensors through the ggml that `libllama_path` (already loaded in this process) uses, reads them back through
// `Tensor`, and returns the op codes the hook compares with. Throws Error(abi) naming the first field that differs.
Ops prove(const std::string& libllama_path);

// What ggml calls with the text of an assertion that failed, before it ends the process; null: it prints the text.
using AbortCallback = void (*)(const char* text);
// Sets one and returns the one before.
using SetAbortCallback = AbortCallback (*)(AbortCallback);
// That function of the ggml that `libllama_path` uses. Throws Error(abi).
SetAbortCallback find_set_abort_callback(const std::string& libllama_path);

// Follows views and reshapes to the tensor that owns the bytes.
const Tensor* root(const Tensor* tensor);

}  // namespace moestream::abi
