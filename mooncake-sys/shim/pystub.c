/* Stands in for Python in a process that has none.
 *
 * A pip wheel's engine.so is a Python module: it needs Python's symbols to load, though none of them is used unless
 * Python imports it. Types and exceptions are zeroed data, large enough for any of them; functions abort with their name,
 * because going on with an invented answer would be worse.
 */
#include <stdio.h>
#include <stdlib.h>

static void called(const char *name) {
    fprintf(stderr, "mooncake-sys: %s was called in a process without Python\n", name);
    abort();
}

#define DATA(name) char name[1024] __attribute__((aligned(64)));
#define FUNCTION(name) void name(void) { called(#name); }
#include "python_symbols.def"
