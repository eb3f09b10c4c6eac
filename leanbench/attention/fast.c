/* Calls seen before, from their arguments to cuLaunchKernelEx without a line of Python.

A key holds every argument of a call but pointers and lengths on the host. Python makes the first
calls of a key, and `learn` takes over the parameter block and the arguments of the launch. A later
call copies the block, writes its own pointers, length and epoch, and launches. Everything else is
Python's: `leanbench/attention/fast.py` has the rules.

Tensors are read through DLPack's exchange API, so the file needs no header of torch or CUDA. The
global interpreter lock protects all state; it is released for the launch alone. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* DLPack 1.x, as far as it is read. */
enum { DL_MAJOR = 1, DL_CPU = 1, DL_CUDA = 2 };

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct Exchange {
    uint32_t major, minor;
    struct Exchange *previous;
    void *allocate, *export, *import;
    int (*read)(PyObject *tensor, Tensor *out);
    int (*stream)(int32_t device_type, int32_t device_id, void **out);
} Exchange;

/* CUlaunchConfig. */
typedef struct {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    uint32_t attribute_count;
} LaunchConfig;

static struct {
    int (*launch)(const LaunchConfig *, void *function, void **parameters, void **extra);
    int (*replace_address)(void *map, void *address);
    int (*is_capturing)(void *stream, int *status);
    int (*device)(int *ordinal);
} driver;

enum {
    MAX_ARGUMENTS = 64,
    MAX_DIMS = 8,
    MAX_WORDS = 512,
    MAX_BLOCK = 2048,
    MAX_ATTRIBUTES = 4,
    ATTRIBUTE_BYTES = 72,
    MAP_ALIGNMENT = 64,
    MAX_PLACES = 32,
    MAX_MAPS = 2,
    /* Two functions and three operators. */
    MAX_FUNCTIONS = 8,
    /* Lengths between two multiples share a key, as in leanbench.kernels.lean.cuda_settings. */
    LENGTHS_TOGETHER = 64,
    SETS = 128,
    WAYS = 8,
    MAX_VARIABLES = 8,
};
enum { NONE, FALSE_, TRUE_, INT, FLOAT, PAIR, CONFIG, TENSOR };

/* A public function of so many arguments. The first ones are tensors that it requires, and up to
   `positional` can be passed without a name. */
typedef struct {
    int arguments, required, positional;
    /* Positions, -1 for none. */
    int lengths, config, out;
    /* Positions of all names, -1 for one that is ignored; and defaults, NULL for a required one. */
    PyObject *names, *defaults[MAX_ARGUMENTS];
} Function;

/* A pointer in a block, and the argument that it comes from, by one of two names. */
typedef struct {
    int32_t offset, argument, alias;
} Place;

typedef struct {
    uint64_t hash;
    size_t words;
    int64_t *key;
    /* The table, and each launch under way. */
    int users;
    void *function;
    LaunchConfig config;
    unsigned char attributes[MAX_ATTRIBUTES * ATTRIBUTE_BYTES];
    Place places[MAX_PLACES], maps[MAX_MAPS];
    int place_count, map_count;
    void *mapped[MAX_MAPS];
    int32_t out_at, lse_at, context_at, epoch_at;
    /* The context is the length of the call and `more`, from `first` to `last`. */
    int64_t more, first, last;
    /* Templates of new tensors; an LSE is returned if it has one. `held` keeps them alive, with
       everything else that the block and the key point to. */
    PyObject *out_like, *lse_like, *held;
    size_t bytes;
    unsigned char *block;
    void *memory;
} Entry;

/* The call of a thread that Python makes. */
typedef struct {
    /* Number of the thread, whose address comes again; and of the call, with its function. */
    int64_t thread, number;
    uint64_t hash;
    size_t words;
    int64_t length;
    void *stream;
    /* Bits of the arguments that are tensors, and their addresses. */
    uint64_t tensors;
    void *pointers[MAX_ARGUMENTS];
    int64_t key[MAX_WORDS];
} Pending;

static _Thread_local Pending pending;
static Entry *table[SETS][WAYS];
/* Keys to learn when they come again: a cache that grows has another one in each call. And, inverted,
   keys that are not to be learned. */
static uint64_t seen[SETS][WAYS];

static const Exchange *exchange;
static Function functions[2];
static PyObject *tensor_type, *parameter_type, *empty_like, *is_grad_enabled, *requires_grad;
static PyObject *epochs, *raise_status;
/* A variable of Python: an item of a dictionary. */
typedef struct {
    PyObject *dictionary, *key, *value;
} Variable;

/* Variables that settings depend on, with the values that `generation` is for; and those whose values
   must be these, as the results of functions must. */
static Variable watched[MAX_VARIABLES], required[MAX_VARIABLES];
static struct {
    PyObject *function, *result;
} required_results[MAX_VARIABLES];
static int64_t generation;

static uint64_t mixed(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_of(const int64_t *key, size_t words) {
    uint64_t hash = 0x9E3779B97F4A7C15u ^ words;
    size_t i = 0;
    for (; i + 1 < words; i += 2)
        hash = mixed(hash ^ (uint64_t)key[i], (uint64_t)key[i + 1] ^ 0xD6E8FEB86659FD93u);
    if (i < words) hash = mixed(hash ^ (uint64_t)key[i], 0xA0761D6478BD642Fu);
    return mixed(hash, 0xE7037ED1A0B428DBu);
}

static void drop(Entry *entry) {
    if (entry == NULL || --entry->users) return;
    Py_XDECREF(entry->held);
    free(entry->key);
    free(entry->memory);
    free(entry);
}

static int has_key(const Entry *entry, uint64_t hash, size_t words, const int64_t *key) {
    return entry->hash == hash && entry->words == words
           && memcmp(entry->key, key, words * sizeof *key) == 0;
}

/* Return the entry of the pending key, moved to the front of its set. */
static Entry *find(const Pending *call) {
    Entry **set = table[call->hash % SETS];
    for (int i = 0; i < WAYS && set[i] != NULL; i++) {
        Entry *entry = set[i];
        if (!has_key(entry, call->hash, call->words, call->key)) continue;
        memmove(set + 1, set, (size_t)i * sizeof *set);
        set[0] = entry;
        return entry;
    }
    return NULL;
}

static void insert(Entry *entry) {
    Entry **set = table[entry->hash % SETS];
    int i = 0;
    while (i < WAYS - 1 && set[i] != NULL
           && !has_key(set[i], entry->hash, entry->words, entry->key))
        i++;
    Entry *dropped = set[i];
    memmove(set + 1, set, (size_t)i * sizeof *set);
    set[0] = entry;
    drop(dropped);
}

/* Return a variable's value, or NULL without one. */
static PyObject *value_of(const Variable *variable) {
    return PyDict_GetItemWithError(variable->dictionary, variable->key);
}

/* Count a generation when a variable has changed. Values are kept and compared by identity: another
   value is another object. */
static void check_watched(void) {
    for (Variable *each = watched; each->dictionary != NULL; each++) {
        PyObject *value = value_of(each), *before = each->value;
        if (value == before) continue;
        Py_XINCREF(value);
        each->value = value;
        Py_XDECREF(before);
        generation++;
    }
}

/* Return 1 if no switch is on that Python has to see. */
static int is_unwatched(void) {
    for (const Variable *each = required; each->dictionary != NULL; each++)
        if (value_of(each) != each->value) return 0;
    return 1;
}

/* Return 1 if no switch, mode or transform is on that Python has to see; -1 on an error. */
static int is_quiet(void) {
    if (!is_unwatched()) return 0;
    for (int i = 0; required_results[i].function != NULL; i++) {
        PyObject *result = PyObject_CallNoArgs(required_results[i].function);
        if (result == NULL) return -1;
        Py_DECREF(result);
        if (result != required_results[i].result) return 0;
    }
    return 1;
}

/* Return 1 if no tensor of the arguments requires a gradient that would be computed. */
static int is_inference(PyObject *const *arguments, int count) {
    PyObject *enabled = PyObject_CallNoArgs(is_grad_enabled);
    if (enabled == NULL) return -1;
    Py_DECREF(enabled);
    if (enabled == Py_False) return 1;
    for (int i = 0; i < count; i++) {
        PyObject *type = arguments[i] == NULL ? NULL : (PyObject *)Py_TYPE(arguments[i]);
        if (type == NULL || (type != tensor_type && type != parameter_type)) continue;
        PyObject *requires = PyObject_GetAttr(arguments[i], requires_grad);
        if (requires == NULL) return -1;
        Py_DECREF(requires);
        if (requires != Py_False) return 0;
    }
    return 1;
}

/* Return 1 on the device of the call, outside of captures. The driver fails without a context,
   which Python's calls make. */
static int is_launchable(const Tensor *q, void *stream) {
    int device = -1, capture = 1;
    if (q->device_type == DL_CPU) return 1;
    if (driver.launch == NULL) return 0;
    return driver.device(&device) == 0 && device == q->device_id
           && driver.is_capturing(stream, &capture) == 0 && capture == 0;
}

/* Write the form of a tensor: everything but its address. */
static int64_t *put_form(int64_t *word, const Tensor *tensor) {
    if (tensor->ndim > MAX_DIMS) return NULL;
    uintptr_t address = (uintptr_t)tensor->data + tensor->byte_offset;
    *word++ = (int64_t)tensor->lanes << 32 | (int64_t)tensor->code << 24
              | (int64_t)tensor->bits << 16 | tensor->ndim << 8 | TENSOR;
    *word++ = (int64_t)tensor->device_type << 40 | (int64_t)(uint32_t)tensor->device_id << 8
              | (address & 15);
    memcpy(word, tensor->shape, (size_t)tensor->ndim * sizeof *word);
    word += tensor->ndim;
    memcpy(word, tensor->strides, (size_t)tensor->ndim * sizeof *word);
    return word + tensor->ndim;
}

static int64_t *put_tensor(int64_t *word, PyObject *tensor, Tensor *read) {
    if (exchange->read(tensor, read) != 0) {
        /* A layout that has no strides, for example. */
        PyErr_Clear();
        return NULL;
    }
    return put_form(word, read);
}

/* Write a length, as its group. */
static void put_length(Pending *call, int64_t *word, int64_t length) {
    call->length = length;
    *word = length % LENGTHS_TOGETHER ? -1 - length / LENGTHS_TOGETHER : length;
}

/* Write an int, or None in a pair. */
static int64_t *put_int(int64_t *word, PyObject *number) {
    int overflow = 0;
    if (number != Py_None && !PyLong_CheckExact(number)) return NULL;
    *word++ = number == Py_None ? NONE : INT;
    *word++ = number == Py_None ? 0 : PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow ? NULL : word;
}

/* Put the arguments of a call in order. Returns 0 for those that Python reports. */
static int read_arguments(const Function *function, PyObject *given, PyObject *named,
                          PyObject **arguments) {
    Py_ssize_t count = PyTuple_Size(given), position = 0;
    PyObject *name, *value;
    if (count > function->positional) return 0;
    memcpy(arguments, function->defaults, sizeof function->defaults);
    for (Py_ssize_t i = 0; i < count; i++) arguments[i] = PyTuple_GetItem(given, i);
    while (PyDict_Next(named, &position, &name, &value)) {
        /* Another type can compare as it likes. */
        PyObject *at = NULL;
        if (PyUnicode_CheckExact(name)) at = PyDict_GetItemWithError(function->names, name);
        if (at == NULL) return 0;
        long i = PyLong_AsLong(at);
        if (i >= 0 && i < count) return 0;
        if (i >= 0) arguments[i] = value;
    }
    return 1;
}

/* Begin a key: the function, what decides settings, and the thread, to which prepared launches and
   hooks on new signatures belong. */
static int64_t *begin_key(Pending *call, int function) {
    static int64_t threads, calls;
    if (call->thread == 0) call->thread = ++threads;
    call->number = ++calls * MAX_FUNCTIONS + function;
    call->length = 0;
    call->key[0] = function;
    call->key[1] = generation;
    call->key[2] = call->thread;
    return call->key + 3;
}

/* End a key with the stream. */
static int end_key(Pending *call, int64_t *word, uint64_t tensors, const Tensor *q) {
    call->tensors = tensors;
    call->stream = NULL;
    if (q->device_type == DL_CUDA) {
        if (exchange->stream(DL_CUDA, q->device_id, &call->stream) != 0) {
            PyErr_Clear();
            return 0;
        }
    } else if (q->device_type != DL_CPU) {
        return 0;
    }
    *word++ = (int64_t)(uintptr_t)call->stream;
    call->words = (size_t)(word - call->key);
    call->hash = hash_of(call->key, call->words);
    return 1;
}

/* Write the key of a call. Returns 0 if C does not know an argument. */
static int make_key(Pending *call, const Function *function, PyObject *const *arguments, Tensor *q) {
    int64_t *where = begin_key(call, (int)(function - functions)), *word = where + 1;
    int64_t *end = call->key + MAX_WORDS - 2 * MAX_DIMS - 4;
    uint64_t given = 0, tensors = 0;
    for (int i = 0; i < function->arguments; i++) {
        PyObject *value = arguments[i];
        if (value == NULL || word > end) return 0;
        if (value == Py_None && i >= function->required) continue;
        given |= (uint64_t)1 << i;
        PyTypeObject *type = Py_TYPE(value);
        if ((PyObject *)type == tensor_type
            || (i >= function->required && (PyObject *)type == parameter_type)) {
            Tensor read;
            if ((word = put_tensor(word, value, &read)) == NULL) return 0;
            tensors |= (uint64_t)1 << i;
            call->pointers[i] = (char *)read.data + read.byte_offset;
            if (i == 0) *q = read;
        } else if (i < function->required) {
            return 0;
        } else if (type == &PyBool_Type) {
            *word++ = value == Py_True ? TRUE_ : FALSE_;
        } else if (type == &PyLong_Type) {
            if ((word = put_int(word, value)) == NULL) return 0;
            if (i == function->lengths) {
                if (word[-1] < 0) return 0;
                put_length(call, word - 1, word[-1]);
            }
        } else if (PyFloat_Check(value)) {
            double number = PyFloat_AsDouble(value);
            *word++ = FLOAT;
            memcpy(word++, &number, sizeof number);
        } else if (type == &PyTuple_Type && PyTuple_Size(value) == 2) {
            *word++ = PAIR;
            for (int side = 0; side < 2; side++)
                if ((word = put_int(word, PyTuple_GetItem(value, side))) == NULL) return 0;
        } else if (i == function->config) {
            /* Its entry keeps it alive. */
            *word++ = CONFIG;
            *word++ = (int64_t)(uintptr_t)value;
        } else {
            return 0;
        }
    }
    *where = (int64_t)given;
    return end_key(call, word, tensors, q);
}

/* Return a new tensor like a template, and write its address to the block. */
static PyObject *new_like(PyObject *template, unsigned char *place) {
    Tensor read;
    PyObject *made = PyObject_CallFunctionObjArgs(empty_like, template, NULL);
    if (made == NULL) return NULL;
    if (exchange->read(made, &read) != 0) {
        Py_DECREF(made);
        return NULL;
    }
    char *address = (char *)read.data + read.byte_offset;
    memcpy(place, &address, sizeof address);
    return made;
}

static int next_epoch(uint32_t *epoch) {
    PyObject *number = PyIter_Next(epochs);
    if (number == NULL) return -1;
    /* 0 is the content of new slots, see leanbench.kernels.lean.workspace. */
    *epoch = (uint32_t)PyLong_AsUnsignedLongLongMask(number);
    if (*epoch == 0) *epoch = 1;
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *failed(int status) {
    PyObject *nothing = PyObject_CallFunction(raise_status, "i", status);
    if (nothing != NULL) {
        Py_DECREF(nothing);
        PyErr_Format(PyExc_RuntimeError, "CUDA driver: error %d", status);
    }
    return NULL;
}

/* Write the block of a call but for its new tensors. Returns a status of the driver, or -1. */
static int fill(Entry *entry, const Pending *call, int64_t context, unsigned char *block) {
    for (int i = 0; i < entry->map_count; i++) {
        void *address = call->pointers[entry->maps[i].argument];
        if (address == entry->mapped[i]) continue;
        int status = driver.replace_address(entry->block + entry->maps[i].offset, address);
        if (status != 0) return status;
        entry->mapped[i] = address;
    }
    memcpy(block, entry->block, entry->bytes);
    for (int i = 0; i < entry->place_count; i++)
        memcpy(block + entry->places[i].offset, &call->pointers[entry->places[i].argument], 8);
    int32_t tokens = (int32_t)context;
    memcpy(block + entry->context_at, &tokens, sizeof tokens);
    uint32_t epoch;
    if (next_epoch(&epoch) != 0) return -1;
    memcpy(block + entry->epoch_at, &epoch, sizeof epoch);
    return 0;
}

/* Launch a filled block, without the global interpreter lock. */
static int start(const Entry *entry, void *stream, unsigned char *block) {
    LaunchConfig config = entry->config;
    config.attributes = (void *)entry->attributes;
    config.stream = stream;
    void *parameters[] = {block};
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = driver.launch(&config, entry->function, parameters, NULL);
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject *launch(Entry *entry, const Pending *call, PyObject *out, int64_t context) {
    _Alignas(MAP_ALIGNMENT) unsigned char block[MAX_BLOCK];
    int status = fill(entry, call, context, block);
    if (status != 0) return status < 0 ? NULL : failed(status);
    void *stream = call->stream;
    /* From here on, another call of this thread may overwrite `call`. */
    PyObject *lse = NULL;
    entry->users++;
    if (out == Py_None)
        out = new_like(entry->out_like, block + entry->out_at);
    else
        Py_INCREF(out);
    if (out != NULL && entry->lse_like != NULL) {
        lse = new_like(entry->lse_like, block + entry->lse_at);
        if (lse == NULL) {
            Py_DECREF(out);
            out = NULL;
        }
    }
    if (out == NULL) {
        drop(entry);
        return NULL;
    }
    status = start(entry, stream, block);
    drop(entry);
    if (status != 0) {
        Py_DECREF(out);
        Py_XDECREF(lse);
        return failed(status);
    }
    if (lse == NULL) return out;
    PyObject *both = PyTuple_Pack(2, out, lse);
    Py_DECREF(out);
    Py_DECREF(lse);
    return both;
}

/* Note a key in place of the oldest of its set. */
static void see(uint64_t hash, uint64_t noted) {
    uint64_t *set = seen[hash % SETS];
    memmove(set + 1, set, (WAYS - 1) * sizeof *set);
    set[0] = noted;
}

/* Return the entry of a call and its context; or NULL, and the call's number if Python is to hand it
   over, else 0. */
static Entry *known(const Pending *call, int64_t *context, int64_t *learns) {
    Entry *entry = find(call);
    *learns = 0;
    if (entry == NULL) {
        uint64_t *set = seen[call->hash % SETS];
        for (int i = 0; i < WAYS; i++) {
            if (set[i] == call->hash) *learns = call->number;
            if (set[i] == call->hash || set[i] == ~call->hash) return NULL;
        }
        see(call->hash, call->hash);
        return NULL;
    }
    *context = call->length + entry->more;
    if (*context >= entry->first && *context <= entry->last) return entry;
    *learns = call->number;
    return NULL;
}

/* Take a tuple and a dictionary of arguments. Return what the call returns; or, if Python is to make
   it, its number to hand its launch over, or 0. */
static PyObject *take(const Function *function, PyObject *const *both, Py_ssize_t count) {
    PyObject *arguments[MAX_ARGUMENTS];
    Pending *call = &pending;
    Tensor q = {0};
    if (count != 2 || !PyTuple_Check(both[0]) || !PyDict_Check(both[1]))
        return PyErr_Format(PyExc_TypeError, "expected a tuple and a dictionary");
    if (!read_arguments(function, both[0], both[1], arguments)) return PyLong_FromLong(0);
    /* These can run Python, which can call this function, so the key comes after them. */
    int is_free = is_quiet();
    if (is_free == 1) is_free = is_inference(arguments, function->arguments);
    if (is_free < 0) return NULL;
    check_watched();
    if (!is_free || !make_key(call, function, arguments, &q)) return PyLong_FromLong(0);
    int64_t context, learns;
    Entry *entry = known(call, &context, &learns);
    if (entry == NULL) return PyLong_FromLongLong(learns);
    if (!is_launchable(&q, call->stream)) return PyLong_FromLong(0);
    return launch(entry, call, arguments[function->out], context);
}

static PyObject *attention(PyObject *self, PyObject *const *both, Py_ssize_t count) {
    return take(&functions[0], both, count);
}

static PyObject *latent(PyObject *self, PyObject *const *both, Py_ssize_t count) {
    return take(&functions[1], both, count);
}

/* Copy places in a block of `size` bytes, and choose between names. Returns their number, or -1. */
static int copy_places(PyObject *bytes, Place *places, int most, size_t size) {
    int count = (int)(PyBytes_Size(bytes) / (Py_ssize_t)sizeof *places);
    if (count > most) return -1;
    memcpy(places, PyBytes_AsString(bytes), (size_t)count * sizeof *places);
    for (Place *place = places; place < places + count; place++) {
        if (!(pending.tensors >> place->argument & 1)) place->argument = place->alias;
        if (!(pending.tensors >> place->argument & 1)) return -1;
        if (place->offset < 0 || (size_t)place->offset + sizeof(void *) > size) return -1;
    }
    return count;
}

static void never_learn(void) {
    uint64_t *set = seen[pending.hash % SETS];
    for (int i = 0; i < WAYS; i++)
        if (set[i] == pending.hash) {
            set[i] = ~pending.hash;
            return;
        }
    see(pending.hash, ~pending.hash);
}

/* Return an entry for the pending call; NULL if a size is too large, or if a pointer of the block is
   not that of the argument it is to come from. */
static Entry *new_entry(PyObject *block, PyObject *config, PyObject *attributes, PyObject *places,
                        PyObject *maps) {
    size_t bytes = (size_t)PyBytes_Size(block), attribute_bytes = (size_t)PyBytes_Size(attributes);
    Entry *entry = calloc(1, sizeof *entry);
    if (entry == NULL) return NULL;
    entry->users = 1;
    entry->key = malloc(pending.words * sizeof *entry->key);
    entry->memory = malloc(bytes + MAP_ALIGNMENT);
    entry->place_count = copy_places(places, entry->places, MAX_PLACES, bytes);
    entry->map_count = copy_places(maps, entry->maps, MAX_MAPS, bytes);
    int fits = entry->key != NULL && entry->memory != NULL && bytes <= MAX_BLOCK
               && attribute_bytes <= sizeof entry->attributes
               && (size_t)PyBytes_Size(config) == sizeof entry->config && entry->map_count >= 0;
    for (int i = 0; fits && i < entry->place_count; i++)
        fits = memcmp(PyBytes_AsString(block) + entry->places[i].offset,
                      &pending.pointers[entry->places[i].argument], sizeof(void *)) == 0;
    if (!fits || entry->place_count < 0) {
        drop(entry);
        return NULL;
    }
    uintptr_t start = (uintptr_t)entry->memory + MAP_ALIGNMENT - 1;
    entry->block = (unsigned char *)(start / MAP_ALIGNMENT * MAP_ALIGNMENT);
    entry->bytes = bytes;
    memcpy(entry->block, PyBytes_AsString(block), bytes);
    for (int i = 0; i < entry->map_count; i++)
        entry->mapped[i] = pending.pointers[entry->maps[i].argument];
    memcpy(&entry->config, PyBytes_AsString(config), sizeof entry->config);
    memcpy(entry->attributes, PyBytes_AsString(attributes), attribute_bytes);
    memcpy(entry->key, pending.key, pending.words * sizeof *entry->key);
    entry->words = pending.words;
    entry->hash = pending.hash;
    return entry;
}

/* Take over the launch of a call, if it is the pending one. */
static PyObject *learn(PyObject *self, PyObject *arguments) {
    PyObject *block, *config, *attributes, *places, *maps, *out_like, *lse_like, *held;
    unsigned long long function, stream;
    long long number;
    int out_at, lse_at, context_at, epoch_at;
    long long context, first, last;
    if (!PyArg_ParseTuple(arguments, "LSKSSKSSiiiiLLLOOO", &number, &block, &function, &config, &attributes,
                          &stream, &places, &maps, &out_at, &lse_at, &context_at, &epoch_at,
                          &context, &first, &last, &out_like, &lse_like, &held))
        return NULL;
    if (number != pending.number) Py_RETURN_NONE;
    Entry *entry = NULL;
    if (stream == (unsigned long long)(uintptr_t)pending.stream)
        entry = new_entry(block, config, attributes, places, maps);
    if (entry == NULL) {
        never_learn();
        Py_RETURN_NONE;
    }
    entry->function = (void *)(uintptr_t)function;
    entry->out_at = out_at;
    entry->lse_at = lse_at;
    entry->context_at = context_at;
    entry->epoch_at = epoch_at;
    entry->more = context - pending.length;
    entry->first = first;
    entry->last = last;
    entry->out_like = out_like;
    entry->lse_like = lse_like == Py_None ? NULL : lse_like;
    /* The arguments hold the templates, too. */
    Py_INCREF(arguments);
    entry->held = arguments;
    insert(entry);
    Py_RETURN_NONE;
}

/* Leave calls like this one to Python, if it is the pending one. */
static PyObject *leave(PyObject *self, PyObject *number) {
    if (PyLong_AsLongLong(number) == pending.number) never_learn();
    Py_RETURN_NONE;
}

static PyObject *clear(PyObject *self, PyObject *nothing) {
    for (int i = 0; i < SETS; i++)
        for (int j = 0; j < WAYS; j++) {
            Entry *entry = table[i][j];
            table[i][j] = NULL;
            drop(entry);
        }
    memset(seen, 0, sizeof seen);
    Py_RETURN_NONE;
}

/* Set the addresses of driver functions. */
static PyObject *use_driver(PyObject *self, PyObject *arguments) {
    unsigned long long start, move, capturing, device;
    if (!PyArg_ParseTuple(arguments, "KKKK", &start, &move, &capturing, &device)) return NULL;
    driver.launch = (int (*)(const LaunchConfig *, void *, void **, void **))(uintptr_t)start;
    driver.replace_address = (int (*)(void *, void *))(uintptr_t)move;
    driver.is_capturing = (int (*)(void *, int *))(uintptr_t)capturing;
    driver.device = (int (*)(int *))(uintptr_t)device;
    Py_RETURN_NONE;
}

/* Read pairs or triples into the rows of an array that ends with NULL. */
static int read_rows(PyObject *rows, PyObject **places, Py_ssize_t columns) {
    Py_ssize_t count = PyTuple_Size(rows);
    if (count < 0 || count >= MAX_VARIABLES) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        for (Py_ssize_t j = 0; j < PyTuple_Size(PyTuple_GetItem(rows, i)); j++)
            places[i * columns + j] = PyTuple_GetItem(PyTuple_GetItem(rows, i), j);
    return 0;
}

/* Set everything that belongs to torch and Python. The arguments live on: this is called once. */
static PyObject *configure(PyObject *self, PyObject *arguments) {
    PyObject *capsule, *results, *values, *variables;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOO", &capsule, &tensor_type, &parameter_type,
                          &empty_like, &is_grad_enabled, &results, &values, &variables, &epochs,
                          &raise_status))
        return NULL;
    const Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (found != NULL && found->major != DL_MAJOR) found = found->previous;
    requires_grad = PyUnicode_InternFromString("requires_grad");
    if (requires_grad == NULL || PyErr_Occurred()) return NULL;
    if (found == NULL || found->read == NULL || found->stream == NULL
        || read_rows(variables, &watched[0].dictionary, 3) != 0
        || read_rows(values, &required[0].dictionary, 3) != 0
        || read_rows(results, &required_results[0].function, 2) != 0) {
        PyErr_SetString(PyExc_ValueError, "torch has another exchange API than DLPack 1");
        return NULL;
    }
    Py_INCREF(arguments);
    exchange = found;
    Py_RETURN_NONE;
}

/* Declare a public function; once for each. */
static PyObject *declare(PyObject *self, PyObject *arguments) {
    int which;
    Function new = {0};
    PyObject *defaults;
    if (!PyArg_ParseTuple(arguments, "iiiiiiOO", &which, &new.required, &new.positional,
                          &new.lengths, &new.config, &new.out, &new.names, &defaults))
        return NULL;
    new.arguments = new.required + (int)PyTuple_Size(defaults);
    if (new.arguments > MAX_ARGUMENTS) return PyErr_Format(PyExc_ValueError, "too many arguments");
    for (int i = new.required; i < new.arguments; i++)
        new.defaults[i] = PyTuple_GetItem(defaults, i - new.required);
    Py_INCREF(arguments);
    functions[which] = new;
    Py_RETURN_NONE;
}

#include "fast_operators.h"

static PyMethodDef methods[] = {
    {"attention", (PyCFunction)(void (*)(void))attention, METH_FASTCALL, NULL},
    {"latent", (PyCFunction)(void (*)(void))latent, METH_FASTCALL, NULL},
    {"learn", learn, METH_VARARGS, NULL},
    {"leave", leave, METH_O, NULL},
    {"clear", clear, METH_NOARGS, NULL},
    {"use_driver", use_driver, METH_VARARGS, NULL},
    {"configure", configure, METH_VARARGS, NULL},
    {"declare", declare, METH_VARARGS, NULL},
    {"use_operators", use_operators, METH_VARARGS, NULL},
    {"operator_learns", operator_learned, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) { return PyModule_Create(&module); }
