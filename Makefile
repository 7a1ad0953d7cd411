# make demo | make test: each installs missing packages, builds and runs. make: builds build/shoal.
# make test-all: also the long tests, every processor level and the sanitizers.
# BUILD=asan: the same under address and undefined-behaviour sanitizers, in build/asan. V=1: show commands.
# make fuzz: every parser under libFuzzer for FUZZ_SECONDS (30) each, from the inputs in test/fuzz/corpus.
# make fuzz-api: mutated requests to the built server under the sanitizers for FUZZ_API_SECONDS (900).
# make docs: the documents as a site with search, in build/site.
# make install PREFIX=/usr/local DESTDIR=: the program, the libraries, their header and pkg-config file, man pages, the starter model.
CC      ?= gcc
BUILD   ?= release
PKGS    := jansson yaml-0.1 libpcre2-8 sqlite3 libsodium gmp
VERSION := 0.1.0

ifeq ($(BUILD),release)
O := build
OPT := -O2
else ifeq ($(BUILD),asan)
O := build/asan
OPT := -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
else ifeq ($(BUILD),fuzz)
O := build/fuzz
CC := clang
# Saves minutes of compilation; the kernels have separate tests under the sanitizers.
KERNEL_OPT := -O1 -fno-sanitize=undefined
OPT := -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
else
$(error BUILD must be release, asan or fuzz)
endif
ifeq ($(V),)
Q := @
say = @echo "  $(1)"
endif

comma := ,

# Rows of option tables omit trailing fields that they do not need.
WARN   := -Wall -Wextra -Wno-missing-field-initializers -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Werror
KERNEL_OPT ?= -O3
CFLAGS ?=
# One set of objects for program, static and shared library: position-independent, symbols hidden but those of shoal.h.
CFLAGS_ALL = -std=gnu11 -g $(OPT) $(WARN) -ffp-contract=off -fno-math-errno -fPIC -fvisibility=hidden \
             -ftls-model=initial-exec -pthread -Iinclude -Isrc \
             -DSHOAL_VERSION='"$(VERSION)"' $(shell pkg-config --cflags $(PKGS) 2>/dev/null) $(CFLAGS)
LIBS    = $(shell pkg-config --libs $(PKGS)) -lunistring -lm -pthread -ldl

# The program links its libraries statically if their archives are installed: fewer files, and a megabyte of memory less
# than with shared objects. Only the program uses libedit (src/cli/line_editor.c); tinfo, bsd and md are for libedit.
LIBS_shoal = $(LIBS) -ledit
ARCHIVES := $(foreach lib,sqlite3 edit bsd md,$(wildcard $(shell $(CC) -print-file-name=lib$(lib).a 2>/dev/null)))
ifeq ($(words $(ARCHIVES)),4)
LIBS_shoal = -Wl,--gc-sections -Wl,-z,pack-relative-relocs -Wl,-Bstatic $(shell pkg-config --libs $(PKGS)) -lunistring \
             -ledit -ltinfo -lbsd -lmd -Wl,-Bdynamic -lm -pthread -ldl
endif

# Instruction sets are enabled per file, never for the whole program: kernels are chosen at run time.
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
ISA_avx512bf16 := $(ISA_avx512) -mavx512bf16
ISA_amx    := $(ISA_avx512bf16) -mamx-tile -mamx-int8 -mamx-bf16

SRC   := $(filter-out src/cli/main.c,$(wildcard src/*/*.c))
OBJ   := $(SRC:%.c=$(O)/%.o)
TEST_SRC := $(wildcard test/test_*.c test/*/test_*.c)
TESTS := $(basename $(notdir $(TEST_SRC)))
vpath test_%.c $(sort $(dir $(TEST_SRC)))

# The sources of kernels for instructions that this machine may lack are tested on emulated instructions.
FLAGS_test_emulated.c := -Itest/emulate -fno-var-tracking-assignments
FLAGS_test_emulated_bf16.c := $(FLAGS_test_emulated.c)
# The server of test_hub.
LIBS_test_hub.c := $(shell pkg-config --libs libmicrohttpd 2>/dev/null)

# Faults are injected between Shoal and the C library: test/test_faults.c.
FLAGS_test_faults.c := $(addprefix -Wl$(comma)--wrap=,malloc calloc realloc free strndup realpath vasprintf exit \
                       open fstat read mmap fdopen fwrite fflush fsync fclose rename)
FLAGS_test_simulation.c := $(addprefix -Wl$(comma)--wrap=,open fwrite fflush fsync rename)
FLAGS_test_backup.c := $(addprefix -Wl$(comma)--wrap=,fflush fsync rename mkdir unlink rmdir)

.PHONY: all deps libraries demo docs test test-all tests load fuzz fuzz-api bench bench-peers bench-depth bench-train bench-memory bench-serve sizes results-swarm results-evolve results-world \
        results-grow results-specialists results-agent results-auto results-sleep install uninstall clean
EXAMPLES := $(basename $(notdir $(wildcard examples/*.c)))
# Translations of messages: scripts/messages.py. Without gettext all messages are English.
CATALOGUES := $(if $(shell command -v msgfmt),$(patsubst po/%.po,build/locale/%/LC_MESSAGES/shoal.mo,$(wildcard po/*.po)))
all: $(O)/shoal $(O)/libshoal.so $(EXAMPLES:%=$(O)/%) $(CATALOGUES)

build/locale/%/LC_MESSAGES/shoal.mo: po/%.po
	$(call say,MSG   $@)
	$(Q)mkdir -p $(@D)
	$(Q)msgfmt -o $@ $<

deps:
	$(Q)sh scripts/setup.sh

# Before the first compilation: which packages are missing, instead of a missing header.
libraries:
	$(Q)pkg-config --exists $(PKGS) libedit 2>/dev/null || sh scripts/setup.sh --print

demo: deps
	$(Q)$(MAKE) --no-print-directory all
	build/shoal demo

docs:
	$(Q)sh scripts/setup.sh mkdocs
	$(Q)PYTHONDONTWRITEBYTECODE=1 mkdocs build --strict --quiet
	@echo "build/site/index.html"

test test-all: deps
	$(Q)sh scripts/setup.sh --tests || echo "some packages are missing; their tests will be skipped"
	$(Q)sh test/run.sh $(if $(filter test-all,$@),--all)

fuzz: deps
	$(Q)sh test/fuzz/run.sh

fuzz-api: deps
	$(Q)$(MAKE) -j"$$(nproc)" --no-print-directory BUILD=asan build/asan/shoal
	$(Q)FUZZ_API_SECONDS=$${FUZZ_API_SECONDS:-900} sh test/fuzz/api.sh

# Speed of this machine, appended to bench/history.csv: compare ratios, not times. On AMX also the predicted speed of a prompt.
bench: deps all
	$(Q)for quant in q8_0 q4_0 bf16; do \
	    build/shoal bench --shape smollm-135m --quant $$quant --history bench/history.csv || exit 1; done
	$(Q)build/shoal bench --model models/fry --history bench/history.csv
	$(Q)build/shoal bench --quant q4_0 --what noise --history bench/history.csv
	$(Q)build/shoal bench --what memory --quant nf4 --kv-cache-dtype i8 --lora-dtype i8 --targets q_proj,v_proj
	$(Q)! build/shoal doctor | grep -q '^level *amx' || python3 bench/amx_cycles.py --bench build/shoal

# Shoal and llama.cpp, alternately. LLAMA_BIN=DIR: a native build with llama-bench and llama-server.
bench-peers: deps all
	$(Q)sh scripts/bench-peers.sh

# Time per token at depths up to 16,384 and, with LLAMA_BIN=DIR, llama.cpp's: bench/depth.py.
bench-depth: deps all
	$(Q)python3 bench/depth.py

# Which commands work with which models on 8, 16 and 24 GB: scripts/sizes.py. WRITE=1: into docs/SIZES.md. An hour or more.
sizes: deps all
	$(Q)python3 scripts/sizes.py $(if $(WRITE),--write)

# The search in the vectors of 100,000 memories: time and recall.
bench-memory: deps $(O)/memory
	$(Q)$(O)/memory

# Shoal's and PyTorch's training, alternately.
bench-train: deps all
	$(Q)sh scripts/bench-train.sh

$(O)/shoal: $(O)/src/cli/main.o $(O)/libshoal.a
	$(call say,LD    $@)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LIBS_shoal)

$(O)/%: examples/%.c $(O)/libshoal.a Makefile
	$(call say,LD    $@)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $< $(O)/libshoal.a $(LIBS)

# The shared library exports the functions of src/lib/symbols.map and nothing else; it has no command (src/cli).
SONAME := libshoal.so.0
$(O)/libshoal.so: $(filter-out $(O)/src/cli/%,$(OBJ)) src/lib/symbols.map
	$(call say,LD    $@)
	$(Q)$(CC) $(CFLAGS_ALL) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=src/lib/symbols.map -Wl,--no-undefined \
	    -Wl,-z,nodelete -o $@ $(filter %.o,$^) $(LIBS)

$(O)/libshoal.a: $(OBJ)
	$(call say,AR    $@)
	$(Q)rm -f $@ && ar rcs $@ $^

# The built-in workflows are files that users can copy, and strings in the program.
$(O)/protocols.inc: $(wildcard protocols/*.yaml) Makefile
	$(call say,TEXT  $@)
	$(Q)mkdir -p $(@D)
	$(Q)for f in $(sort $(wildcard protocols/*.yaml)); do echo "{\"$$(basename $$f .yaml)\","; \
	    sed 's/\\/\\\\/g; s/"/\\"/g; s/^/"/; s/$$/\\n"/' $$f; echo "},"; done >$@
$(O)/src/swarm/workflow.o: $(O)/protocols.inc
$(O)/src/swarm/workflow.o: CFLAGS_ALL += -I$(O)

# The program contains the files of the web page: one row for each.
$(O)/page.inc: $(wildcard web/*) Makefile
	$(call say,PAGE  $@)
	$(Q)mkdir -p $(@D)
	$(Q)n=0; for f in $(sort $(wildcard web/*)); do echo "FILE_ROW($$n, \"$$(basename $$f)\")"; n=$$((n + 1)); done >$@
$(O)/src/api/web_ui.o: $(O)/page.inc
$(O)/src/api/web_ui.o: CFLAGS_ALL += -I$(O)

# It contains the files that 'shoal --licenses' prints.
$(O)/src/cli/help.o: LICENSE THIRD_PARTY_NOTICES

$(O)/%.o: %.c Makefile | libraries
	$(call say,CC    $<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_ALL) $(if $(filter src/kernel/%,$<),$(KERNEL_OPT) $(ISA_$(firstword $(subst _, ,$(basename $(notdir $<)))))) -MMD -MP -c -o $@ $<

$(O)/test_%: test_%.c $(O)/libshoal.a Makefile
	$(call say,TEST  $@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_ALL) -Itest $(FLAGS_$(<F)) -MMD -MP -MF $@.d -o $@ $< $(O)/libshoal.a -lcmocka $(LIBS_$(<F)) $(LIBS)

FLAGS_fuzzer.c := -fsanitize=fuzzer
$(O)/fuzzer $(O)/seeds: $(O)/%: test/fuzz/%.c test/fuzz/targets.c $(O)/libshoal.a Makefile
	$(call say,FUZZ  $@)
	$(Q)$(CC) $(CFLAGS_ALL) $(FLAGS_$(<F)) -o $@ $< $(O)/libshoal.a $(LIBS)

# The tables of docs/RESULTS.md.
results-swarm results-evolve results-world results-grow results-specialists results-agent results-auto results-sleep: deps all
	$(Q)sh scripts/$@.sh

tests: $(TESTS:%=$(O)/%) $(O)/load

$(O)/load: bench/load.c bench/tally.h Makefile
	$(call say,LD    $@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $<

$(O)/bare $(O)/starter $(O)/memory: $(O)/%: bench/%.c bench/tally.h $(O)/libshoal.a Makefile
	$(call say,LD    $@)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $< $(O)/libshoal.a $(LIBS)

# The server under load and the bare engine with the same work, alternately.
bench-serve: deps all $(O)/load $(O)/bare
	$(Q)sh scripts/bench-serve.sh

# The server under load for a minute, and 2,000 idle streams (test/serve/test_load.sh runs both for seconds).
load: deps all tests
	$(Q)SHOAL="$(PWD)/build/shoal" LOAD_SECONDS=60 sh test/serve/test_load.sh

# The program finds share/shoal (cli_find_file), so 'shoal demo' works in every folder.
PREFIX  ?= /usr/local
DESTDIR ?=
AT      = $(DESTDIR)$(PREFIX)
MAN     = $(AT)/share/man/man1
install: all
	install -d $(AT)/bin $(AT)/include $(AT)/lib/pkgconfig $(AT)/share/shoal $(AT)/share/doc/shoal $(MAN)
	install -m 755 build/shoal $(AT)/bin/
	install -m 644 include/shoal.h $(AT)/include/
	install -m 644 build/libshoal.a $(AT)/lib/
	install -m 644 build/libshoal.so $(AT)/lib/$(SONAME)
	ln -sf $(SONAME) $(AT)/lib/libshoal.so
	printf '%s\n' 'prefix=$(PREFIX)' 'Name: shoal' 'Description: many LoRA agents on one small language model' \
	    'Version: $(VERSION)' 'Requires.private: $(PKGS)' 'Cflags: -I$${prefix}/include' \
	    'Libs: -L$${prefix}/lib -lshoal' 'Libs.private: -lunistring -lm -pthread -ldl' >$(AT)/lib/pkgconfig/shoal.pc
	cp -R models data examples protocols worlds $(wildcard build/locale) $(AT)/share/shoal/
	cp -R README.md LICENSE THIRD_PARTY_NOTICES docs $(AT)/share/doc/shoal/
	build/shoal help --man >$(MAN)/shoal.1
	for c in $$(sed -n 's/^\.It Xr shoal-\(.*\) 1$$/\1/p' $(MAN)/shoal.1); do \
	    build/shoal help --man $$c >$(MAN)/shoal-$$c.1 || exit 1; done
uninstall:
	rm -rf $(MAN)/shoal.1 $(MAN)/shoal-*.1 $(AT)/bin/shoal $(AT)/include/shoal.h $(AT)/lib/libshoal.a $(AT)/lib/libshoal.so $(AT)/lib/$(SONAME) \
	    $(AT)/lib/pkgconfig/shoal.pc $(AT)/share/shoal $(AT)/share/doc/shoal

clean:
	rm -rf build

-include $(OBJ:.o=.d) $(O)/src/cli/main.d $(TESTS:%=$(O)/%.d)
