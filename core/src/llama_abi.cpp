#include "moestream/llama_abi.h"

#include <dlfcn.h>

#include <cstring>
#include <vector>

#include "moestream/error.h"

namespace moestream::abi {
namespace {

struct InitParams {
    size_t mem_size;
    void* mem_buffer;
    bool no_alloc;
};

[[noreturn]] void differs(const std::string& what) {
    throw Error(ErrorKind::abi, "ggml's tensor layout is not the one this version knows: " + what + " differs");
}

void check(bool same, const char* what) {
    if (!same) differs(what);
}

template <class Function>
Function symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) {
        throw Error(ErrorKind::abi, std::string("the loaded llama.cpp has no symbol ") + name);
    }
    return reinterpret_cast<Function>(found);
}

struct Library {
    void* handle;
    explicit Library(const std::string& path) : handle(dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
        if (handle == nullptr) throw Error(ErrorKind::abi, "llama.cpp is not loaded from " + path);
    }
    ~Library() { dlclose(handle); }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;
};

using NewTensor = Tensor* (*)(void*, int, int64_t, int64_t, int64_t);
using Binary = Tensor* (*)(void*, Tensor*, Tensor*);

void prove_plain(void* library, void* context, Tensor* tensor) {
    const auto set_name = symbol<Tensor* (*)(Tensor*, const char*)>(library, "ggml_set_name");
    const auto get_name = symbol<const char* (*)(const Tensor*)>(library, "ggml_get_name");
    const auto get_data = symbol<void* (*)(const Tensor*)>(library, "ggml_get_data");
    const auto nbytes = symbol<size_t (*)(const Tensor*)>(library, "ggml_nbytes");
    const auto view = symbol<Tensor* (*)(void*, Tensor*, int64_t, int64_t, size_t, size_t)>(library, "ggml_view_2d");
    check(tensor->type == kTypeF32, "type");
    check(tensor->ne[0] == 32 && tensor->ne[1] == 16 && tensor->ne[2] == 4 && tensor->ne[3] == 1, "ne");
    check(tensor->nb[0] == 4 && tensor->nb[1] == 128 && tensor->nb[2] == 2048, "nb");
    check(nbytes(tensor) == 8192, "nbytes");
    set_name(tensor, "moestream.proof");
    check(std::strcmp(tensor->name, "moestream.proof") == 0 && get_name(tensor) == tensor->name, "name");
    tensor->data = &library;
    check(get_data(tensor) == &library, "data");
    tensor->data = nullptr;
    const Tensor* part = view(context, tensor, 8, 4, 256, 64);
    check(part->view_src == tensor && part->view_offs == 64 && part->nb[1] == 256, "view_src");
}

Ops prove_ops(void* library, void* context, NewTensor make, Tensor* experts) {
    const auto op_name = symbol<const char* (*)(int)>(library, "ggml_op_name");
    const auto mul_mat_id =
        symbol<Tensor* (*)(void*, Tensor*, Tensor*, Tensor*)>(library, "ggml_mul_mat_id");
    const auto mul_mat = symbol<Binary>(library, "ggml_mul_mat");
    const auto mul = symbol<Binary>(library, "ggml_mul");
    Tensor* input = make(context, kTypeF32, 32, 2, 5);
    Tensor* ids = make(context, kTypeI32, 2, 5, 1);
    const Tensor* routed = mul_mat_id(context, experts, input, ids);
    check(routed->src[0] == experts && routed->src[1] == input && routed->src[2] == ids, "src");
    check(std::strcmp(op_name(routed->op), "MUL_MAT_ID") == 0, "op");
    check(ids->type == kTypeI32, "type I32");
    Tensor* left = make(context, kTypeF32, 32, 4, 1);
    Tensor* right = make(context, kTypeF32, 32, 4, 1);
    const Tensor* product = mul_mat(context, left, right);
    const Tensor* scaled = mul(context, left, right);
    check(std::strcmp(op_name(product->op), "MUL_MAT") == 0 && product->src[1] == right, "op MUL_MAT");
    check(std::strcmp(op_name(scaled->op), "MUL") == 0 && scaled->src[1] == right, "op MUL");
    return Ops{routed->op, product->op, scaled->op};
}

}  // namespace

Ops prove(const std::string& libllama_path) {
    const Library library(libllama_path);
    const auto init = symbol<void* (*)(InitParams)>(library.handle, "ggml_init");
    const auto release = symbol<void (*)(void*)>(library.handle, "ggml_free");
    const auto overhead = symbol<size_t (*)()>(library.handle, "ggml_tensor_overhead");
    const auto make = symbol<NewTensor>(library.handle, "ggml_new_tensor_3d");
    // An object header precedes each tensor: the overhead is the structure's size and that header's.
    check(overhead() >= sizeof(Tensor) && overhead() <= sizeof(Tensor) + 128, "size");
    std::vector<std::byte> memory(64 * overhead());
    void* context = init(InitParams{memory.size(), memory.data(), true});
    if (context == nullptr) throw Error(ErrorKind::abi, "ggml_init failed");
    struct Release {
        void (*function)(void*);
        void* context;
        ~Release() { function(context); }
    } const guard{release, context};
    Tensor* experts = make(context, kTypeF32, 32, 16, 4);
    prove_plain(library.handle, context, experts);
    return prove_ops(library.handle, context, make, experts);
}

SetAbortCallback find_set_abort_callback(const std::string& libllama_path) {
    const Library library(libllama_path);
    return symbol<SetAbortCallback>(library.handle, "ggml_set_abort_callback");
}

const Tensor* root(const Tensor* tensor) {
    while (tensor->view_src != nullptr) tensor = tensor->view_src;
    return tensor;
}

}  // namespace moestream::abi
