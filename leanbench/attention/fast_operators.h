/* Operators of compiled graphs in C, included by fast.c.

torch calls them without Python, with a stack of words (torch/csrc/stable): handles of tensors, and
numbers; an optional value is null or the address of its word. Handles and words belong to the
operator that is called. What C does not know, it passes on to an operator of Python. */

enum { FUNCTIONS = 2, OPERATORS = 3, OUTPUTS = 2 };
/* torch's numbers of devices and dtypes. */
enum { TORCH_CPU = 0, TORCH_CUDA = 1, TORCH_HALF = 5, TORCH_FLOAT = 6, TORCH_BFLOAT16 = 15 };

/* An operator, and that of Python with its overload. A letter for each argument: of a Tensor, an
   Int, a Float or a Bool; in lower case for optional ones, `x` if C knows only None. */
typedef struct {
    const char *name, *python, *overload, *types;
    int lengths;
} Operator;

static Operator operators[OPERATORS];
/* The pending call's number if Python is to hand its launch over, else 0. */
static _Thread_local int64_t operator_learns;
static PyObject *last_error;

/* Functions of torch's C interface. */
static struct {
    int (*library)(const char *space, const char *key, const char *file, uint32_t line, void **made);
    int (*implement)(void *library, const char *name, void (*function)(uint64_t *, uint64_t, uint64_t));
    int (*call)(const char *name, const char *overload, uint64_t *stack);
    int (*address)(void *tensor, void **result);
    int (*dim)(void *tensor, int64_t *result);
    int (*sizes)(void *tensor, int64_t **result);
    int (*strides)(void *tensor, int64_t **result);
    int (*dtype)(void *tensor, int32_t *result);
    int (*device_type)(void *tensor, int32_t *result);
    int (*device_index)(void *tensor, int32_t *result);
    int (*empty)(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                 int32_t device_type, int32_t device_index, void **made);
    int (*delete)(void *tensor);
    /* C++'s operator delete, and the function that throws c10::Error. */
    void (*free_word)(void *);
    void (*raise)(const char *function, const char *file, uint32_t line, const char *message);
} torch;

static int read_handle(void *handle, Tensor *tensor) {
    int64_t dim;
    int32_t dtype, device_type, device_index;
    if (torch.dim(handle, &dim) || torch.sizes(handle, &tensor->shape)
        || torch.strides(handle, &tensor->strides) || torch.dtype(handle, &dtype)
        || torch.device_type(handle, &device_type) || torch.device_index(handle, &device_index)
        || torch.address(handle, &tensor->data))
        return -1;
    if (device_type != TORCH_CPU && device_type != TORCH_CUDA) return -1;
    tensor->device_type = device_type == TORCH_CUDA ? DL_CUDA : DL_CPU;
    tensor->device_id = device_index;
    tensor->ndim = (int32_t)dim;
    tensor->lanes = (uint16_t)dtype;
    return 0;
}

/* Write the key of an operator's call. Returns 0 if C does not know an argument. */
static int make_operator_key(Pending *call, const Operator *operator, const uint64_t *stack, Tensor *q) {
    int64_t *where = begin_key(call, FUNCTIONS + (int)(operator - operators)), *word = where + 1;
    int64_t *end = call->key + MAX_WORDS - 2 * MAX_DIMS - 4;
    uint64_t given = 0, tensors = 0;
    for (int i = 0; operator->types[i] != 0; i++) {
        uint64_t value = stack[i];
        char type = operator->types[i];
        if (word > end) return 0;
        if (type >= 'a') {
            if (value == 0) continue;
            value = *(uint64_t *)(uintptr_t)value;
        }
        given |= (uint64_t)1 << i;
        if (type == 'T' || type == 't') {
            Tensor read = {0};
            if (read_handle((void *)(uintptr_t)value, &read) != 0) return 0;
            if ((word = put_form(word, &read)) == NULL) return 0;
            tensors |= (uint64_t)1 << i;
            call->pointers[i] = read.data;
            if (i == 0) *q = read;
        } else if (i == operator->lengths) {
            if ((int64_t)value < 0) return 0;
            put_length(call, word++, (int64_t)value);
        } else if (type == 'B' || type == 'b') {
            *word++ = (int64_t)(value & 1);
        } else if (type == 'x') {
            return 0;
        } else {
            *word++ = (int64_t)value;
        }
    }
    *where = (int64_t)given;
    return end_key(call, word, tensors, q);
}

/* Return a new tensor of a template's form, contiguous, and write its address to the block. */
static void *new_handle(PyObject *template, unsigned char *place) {
    Tensor like;
    int64_t strides[MAX_DIMS], step = 1;
    void *made = NULL, *address;
    if (exchange->read(template, &like) != 0 || like.ndim > MAX_DIMS) {
        PyErr_Clear();
        return NULL;
    }
    for (int i = like.ndim - 1; i >= 0; i--) {
        strides[i] = step;
        step *= like.shape[i];
    }
    int32_t dtype = like.bits == 32 ? TORCH_FLOAT : like.code == 4 ? TORCH_BFLOAT16 : TORCH_HALF;
    int32_t device = like.device_type == DL_CUDA ? TORCH_CUDA : TORCH_CPU;
    if (torch.empty(like.ndim, like.shape, strides, dtype, device, like.device_id, &made)) return NULL;
    if (torch.address(made, &address) != 0) {
        torch.delete(made);
        return NULL;
    }
    memcpy(place, &address, sizeof address);
    return made;
}

static void free_arguments(const Operator *operator, const uint64_t *stack) {
    for (int i = 0; operator->types[i] != 0; i++) {
        char type = operator->types[i];
        if (type >= 'a' && stack[i] == 0) continue;
        uint64_t *word = type >= 'a' ? (uint64_t *)(uintptr_t)stack[i] : NULL;
        if (type == 'T' || type == 't') torch.delete((void *)(uintptr_t)(word ? *word : stack[i]));
        if (word != NULL) torch.free_word(word);
    }
}

/* Launch a known call, with its outputs in `made`. Returns 0 if Python is to make the call, -1 with
   an error of Python. */
static int operate_known(const Operator *operator, const uint64_t *stack, void **made) {
    Pending *call = &pending;
    Tensor q = {0};
    int64_t context;
    _Alignas(MAP_ALIGNMENT) unsigned char block[MAX_BLOCK];
    operator_learns = 0;
    check_watched();
    if (!make_operator_key(call, operator, stack, &q)) return 0;
    Entry *entry = known(call, &context, &operator_learns);
    if (entry == NULL) return 0;
    /* torch has seen to modes and transforms. */
    if (entry->lse_like == NULL || !is_unwatched() || !is_launchable(&q, call->stream)) return 0;
    int status = fill(entry, call, context, block);
    if (status == 0) {
        entry->users++;
        made[0] = new_handle(entry->out_like, block + entry->out_at);
        made[1] = new_handle(entry->lse_like, block + entry->lse_at);
        if (made[0] == NULL || made[1] == NULL) {
            /* Python runs out of memory with a sentence. */
            for (int i = 0; i < OUTPUTS; i++)
                if (made[i] != NULL) torch.delete(made[i]);
            drop(entry);
            return 0;
        }
        status = start(entry, call->stream, block);
        drop(entry);
        if (status == 0) return 1;
        torch.delete(made[0]);
        torch.delete(made[1]);
    }
    if (status > 0) failed(status);
    return -1;
}

/* Throw C's error, or that of Python's operator, as torch's with its words. */
static void raise_error(const Operator *operator, PyGILState_STATE lock) {
    /* Characters have at most four bytes. */
    enum { MOST = 1000 };
    char message[4 * MOST + 1] = "";
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *words = value != NULL ? PyObject_Str(value) : PyObject_CallNoArgs(last_error);
    PyObject *first = words == NULL ? NULL : PyUnicode_Substring(words, 0, MOST);
    PyObject *bytes = first == NULL ? NULL : PyUnicode_AsUTF8String(first);
    if (bytes != NULL) strncpy(message, PyBytes_AsString(bytes), sizeof message - 1);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(words);
    Py_XDECREF(first);
    Py_XDECREF(bytes);
    PyErr_Clear();
    PyGILState_Release(lock);
    torch.raise(operator->name, "leanbench", 0, message);
}

static void operate(const Operator *operator, uint64_t *stack) {
    void *made[OUTPUTS] = {NULL, NULL};
    PyGILState_STATE lock = PyGILState_Ensure();
    int done = operate_known(operator, stack, made);
    if (done < 0) {
        free_arguments(operator, stack);
        raise_error(operator, lock);
    }
    PyGILState_Release(lock);
    if (done == 1) {
        free_arguments(operator, stack);
        for (int i = 0; i < OUTPUTS; i++) stack[i] = (uint64_t)(uintptr_t)made[i];
    } else if (torch.call(operator->python, operator->overload, stack) != 0) {
        raise_error(operator, PyGILState_Ensure());
    }
}

static void operate_0(uint64_t *stack, uint64_t arguments, uint64_t outputs) { operate(operators, stack); }
static void operate_1(uint64_t *stack, uint64_t arguments, uint64_t outputs) { operate(operators + 1, stack); }
static void operate_2(uint64_t *stack, uint64_t arguments, uint64_t outputs) { operate(operators + 2, stack); }

/* Return the number of the call that Python's operator makes if it is to be handed over, else 0. */
static PyObject *operator_learned(PyObject *self, PyObject *nothing) {
    int64_t learns = operator_learns;
    operator_learns = 0;
    return PyLong_FromLongLong(learns);
}

/* Register the operators for a dispatch key. The arguments live on: this is called once. */
static PyObject *use_operators(PyObject *self, PyObject *arguments) {
    static void (*const functions_of[])(uint64_t *, uint64_t, uint64_t) = {operate_0, operate_1, operate_2};
    PyObject *addresses, *each[OPERATORS];
    const char *key;
    void *library = NULL;
    if (!PyArg_ParseTuple(arguments, "sSO(OOO)", &key, &addresses, &last_error, &each[0], &each[1],
                          &each[2]))
        return NULL;
    if (PyBytes_Size(addresses) != sizeof torch) {
        PyErr_SetString(PyExc_ValueError, "another number of functions");
        return NULL;
    }
    memcpy(&torch, PyBytes_AsString(addresses), sizeof torch);
    for (int i = 0; i < OPERATORS; i++) {
        Operator *operator = operators + i;
        if (!PyArg_ParseTuple(each[i], "ssssi", &operator->name, &operator->python,
                              &operator->overload, &operator->types, &operator->lengths))
            return NULL;
    }
    Py_INCREF(arguments);
    int failure = torch.library("leanbench", key, "fast.c", 0, &library);
    for (int i = 0; i < OPERATORS && !failure; i++)
        failure = torch.implement(library, operators[i].name, functions_of[i]);
    if (failure) {
        PyErr_SetString(PyExc_ValueError, "torch did not take the operators");
        return NULL;
    }
    Py_RETURN_NONE;
}
