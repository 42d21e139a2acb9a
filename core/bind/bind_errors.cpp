// core errors -> one Python exception, CoreError(kind, text); the package turns its kinds into its own tree.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "moestream/error.h"

namespace nb = nanobind;

namespace {

const char* name(moestream::ErrorKind kind) {
    switch (kind) {
        case moestream::ErrorKind::usage: return "usage";
        case moestream::ErrorKind::refused: return "refused";
        case moestream::ErrorKind::unsupported: return "unsupported";
        case moestream::ErrorKind::io: return "io";
        case moestream::ErrorKind::abi: return "abi";
        case moestream::ErrorKind::internal: return "internal";
    }
    return "internal";
}

}  // namespace

void bind_errors(nb::module_& m) {
    static nb::object exception = nb::steal(PyErr_NewException("moestream._core.CoreError", PyExc_Exception, nullptr));
    m.attr("CoreError") = exception;
    nb::register_exception_translator(
        [](const std::exception_ptr& pointer, void*) {
            try {
                std::rethrow_exception(pointer);
            } catch (const moestream::Error& error) {
                PyErr_SetObject(exception.ptr(), nb::make_tuple(name(error.kind), error.what()).ptr());
            }
        },
        nullptr);
}
