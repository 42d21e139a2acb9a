// The core's tests are plain executables: no framework, one macro. A failed check prints where and what, the test
// goes on, and `return checks_failed();` at the end of main gives the exit code. Exit with kSkip (77, CTest's
// SKIP_RETURN_CODE) when this kernel cannot do what is tested: say why first.
#pragma once
#include <cstdio>
#include <string>

#include "moestream/error.h"

namespace moestream::test {

inline constexpr int kSkip = 77;

inline int& failures() {
    static int count = 0;
    return count;
}

inline int checks_failed() {
    if (failures() != 0) std::fprintf(stderr, "%d check(s) failed\n", failures());
    return failures() == 0 ? 0 : 1;
}

inline void report(const char* file, int line, const char* what, const std::string& detail) {
    ++failures();
    std::fprintf(stderr, "%s:%d: %s%s%s\n", file, line, what, detail.empty() ? "" : ": ", detail.c_str());
}

template <class Call>
bool throws(ErrorKind kind, Call&& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.kind == kind;
    }
    return false;
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* file, int line, const char* what) {
    if (a == b) return;
    if constexpr (requires { std::to_string(a); std::to_string(b); }) {
        report(file, line, what, std::to_string(a) + " is not " + std::to_string(b));
    } else {
        report(file, line, what, "");
    }
}

}  // namespace moestream::test

// The condition holds.
#define CHECK(...)                                                                          \
    do {                                                                                    \
        if (!(__VA_ARGS__)) ::moestream::test::report(__FILE__, __LINE__, #__VA_ARGS__, ""); \
    } while (false)

// Two values are equal; numbers are printed when they are not.
#define CHECK_EQ(a, b) ::moestream::test::check_equal((a), (b), __FILE__, __LINE__, #a " == " #b)

// The statement throws moestream::Error of this kind.
#define CHECK_THROWS(kind, ...)                                                                           \
    do {                                                                                                  \
        if (!::moestream::test::throws(::moestream::ErrorKind::kind, [&] { (void)(__VA_ARGS__); }))       \
            ::moestream::test::report(__FILE__, __LINE__, #__VA_ARGS__, "does not throw Error(" #kind ")"); \
    } while (false)
