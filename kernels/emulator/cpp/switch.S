// void emulator_switch(void** save, void* load): stores the callee-saved registers and the stack pointer of the running
// fiber, takes those of another. System V ABI, x86-64.
#if defined(__x86_64__)
    .text
    .globl emulator_switch
    .type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size emulator_switch, . - emulator_switch
#endif
    .section .note.GNU-stack, "", @progbits
