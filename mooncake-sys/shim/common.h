// What the Transfer Engine's shim and the Store's have in common: no C++ exception leaves them, and functions are looked up
// by name.
#pragma once

#include <dlfcn.h>

#include <climits>
#include <cstddef>
#include <cstring>
#include <exception>
#include <string>

namespace moonring {

// Codes of our own, far from Mooncake's (which lie between -2000 and 999).
constexpr int kException = INT_MIN;
constexpr int kNoCode = INT_MIN + 1;

struct Buffer {
    void *addr;
    size_t length;
};
static_assert(sizeof(Buffer) == 16, "buffer_entry");

// Where a function leaves the text that belongs to a code other than 0.
class Text {
  public:
    Text(char *out, size_t capacity) : out_(out), capacity_(capacity) { out_[0] = 0; }
    void set(const char *text) {
        if (!text) return;
        size_t n = std::strlen(text);
        if (n >= capacity_) n = capacity_ - 1;
        std::memcpy(out_, text, n);
        out_[n] = 0;
    }

  private:
    char *out_;
    size_t capacity_;
};

template <class F>
int guarded(char *out, size_t capacity, F body) noexcept {
    Text text(out, capacity);
    try {
        return body(text);
    } catch (const std::exception &e) {
        text.set(e.what());
    } catch (...) {
        text.set("an exception that is no std::exception");
    }
    return kException;
}

// Looks symbols up and keeps the names of those that are missing.
class Lookup {
  public:
    explicit Lookup(void *handle) : handle_(handle) {}
    template <class F>
    void operator()(F &function, const char *name) {
        function = reinterpret_cast<F>(dlsym(handle_, name));
        if (!function) {
            if (!missing_.empty()) missing_ += ' ';
            missing_ += name;
        }
    }
    const std::string &missing() const { return missing_; }

  private:
    void *handle_;
    std::string missing_;
};

}  // namespace moonring
