// What keeps llama.cpp from ending the process, as a context manager.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "bind.h"
#include "moestream/assert_guard.h"

namespace nb = nanobind;
using namespace moestream;

namespace {

struct GuardedAsserts {
    abi::SetAbortCallback set;
    std::unique_ptr<AssertGuard> guard;
};

}  // namespace

void bind_guards(nb::module_& m) {
    nb::class_<GuardedAsserts>(m, "GuardedAsserts",
                               "While inside, an assertion of ggml's that fails on this thread is a failed load.")
        .def("__init__",
             [](GuardedAsserts* self, const std::string& libllama) {
                 new (self) GuardedAsserts{abi::find_set_abort_callback(libllama), nullptr};
             },
             nb::arg("libllama"))
        .def("__enter__",
             [](GuardedAsserts& self) -> GuardedAsserts& {
                 self.guard = std::make_unique<AssertGuard>(self.set);
                 return self;
             },
             nb::rv_policy::none)
        .def("__exit__", [](GuardedAsserts& self, nb::object, nb::object, nb::object) { self.guard.reset(); },
             nb::arg("kind").none(), nb::arg("error").none(), nb::arg("trace").none());
    m.def("failed_assertion", &AssertGuard::failed,
          "What failed on this thread since its guard began, with its place in the source; '' for nothing.");
}
