// SPDX-License-Identifier: Apache-2.0

// Package policy decides which container, or which user of the guest, may have which program
// run in the guest, with which arguments and environment, and within which limits.
package policy

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/port"
)

// Entry is one program, and who may run it.
type Entry struct {
	Name      string           `key:"name" is:"name" need:"no name: want the one by which clients ask for the program" help:"by which clients ask for the program"` // no other entry has it
	Match     rules.Match      `key:"match" only:"name,namespace,labels" keys:"some" either:"who" json:"-" help:"the containers that may run it"`                   // none if it is empty
	Users     []string         `key:"users" is:"text" either:"who" json:"-" help:"users of the guest who may run it without a container, by name or number"`
	Path      string           `key:"path" is:"path" types:"string" pattern:"^/" need:"no path: want the program's" help:"the program"`
	SHA256    string           `key:"sha256" is:"sum" types:"string" pattern:"^[0-9a-f]{64}$" need:"no sha256: want that of the program (sha256sum PATH)" help:"of the file at path"`
	Args      []*regexp.Regexp `key:"args" is:"pattern" help:"a regular expression for each argument, which it matches whole"`
	Env       []string         `key:"env" is:"variable" types:"string" pattern:"^[A-Za-z_][A-Za-z0-9_]*$" help:"variables that the client may set"`
	Directory string           `key:"directory" is:"path" types:"string" pattern:"^/" help:"in which it runs; / by default"`
	User      string           `key:"user" is:"user" need:"no user: want the one as whom the program runs" help:"as whom it runs, by name or number, never root"`
	TTY       bool             `key:"tty" help:"clients may ask for a terminal"`

	// What the program may use with all that it started; 0 is no limit.
	Memory    int64         `key:"memory" is:"memory" types:"string" pattern:"^[1-9][0-9]{0,5}(MiB|GiB)$" help:"that it may have, in MiB or GiB"` // bytes
	Processes int           `key:"processes" min:"1" max:"4194304" help:"that it may have at once, threads included"`
	Time      time.Duration `key:"time" min:"1s" max:"8760h" help:"for which it may run"`
}

// Check returns what no single field shows to be wrong.
func (e *Entry) Check() (key string, err error) {
	if !e.containers() && len(e.Users) == 0 {
		return "", errors.New(`nobody may run it: want match with name, namespace or labels (name: "*" for all containers), or users`)
	}
	return "", nil
}

// Serve is the command of fairlead-run that serves, so no program has this name.
const Serve = "serve"

// Policy is a list of entries. What no entry allows is denied.
type Policy []Entry

// Check returns that two entries have one name.
func (p Policy) Check() error {
	for i := range p {
		if p.Find(p[i].Name) != &p[i] {
			return fmt.Errorf("two entries have the name %q", p[i].Name)
		}
	}
	return nil
}

// Checks read the texts of entries, by the tag "is" of their fields.
func Checks() yamltree.Checks {
	return yamltree.Checks{
		"name": as(checkName), "path": as(checkPath), "sum": as(checkSum), "user": as(checkUser),
		"pattern": as(parsePattern), "variable": as(parseVariable), "memory": as(parseMemory),
	}
}

// as names in each error the text that was read.
func as[T any](parse func(string) (T, error)) func(string) (any, error) {
	return func(s string) (any, error) {
		v, err := parse(s)
		if err != nil {
			err = fmt.Errorf("%q: %w", s, err)
		}
		return v, err
	}
}

var memorySyntax = regexp.MustCompile(`\A([1-9][0-9]{0,5})(MiB|GiB)\z`)

// parseMemory reads an amount of memory, in bytes.
func parseMemory(s string) (int64, error) {
	m := memorySyntax.FindStringSubmatch(s)
	if m == nil {
		return 0, errors.New("want a number of MiB or GiB, such as 64MiB")
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if m[2] == "GiB" {
		n <<= 10
	}
	return n << 20, err
}

var nameSyntax = regexp.MustCompile(`\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\z`)

func checkName(s string) (string, error) {
	switch {
	case !nameSyntax.MatchString(s):
		return s, errors.New("want at most 64 letters, digits, dots, hyphens and underscores, the first a letter or digit")
	case s == Serve:
		return s, errors.New("fairlead-run has a command of this name: want another one")
	}
	return s, nil
}

func checkPath(s string) (string, error) {
	if !filepath.IsAbs(s) || filepath.Clean(s) != s || strings.ContainsRune(s, 0) {
		return s, errors.New("want an absolute path in its shortest form")
	}
	return s, nil
}

func checkSum(s string) (string, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 32 || strings.ToLower(s) != s {
		return s, errors.New("want 64 hexadecimal digits in lower case")
	}
	return s, nil
}

// checkUser refuses root: a job of root could change the agent and its configuration.
func checkUser(s string) (string, error) {
	switch {
	case s == "":
		return s, errors.New("want a user's name or number")
	case s == "root" || strings.Trim(s, "0") == "":
		return s, errors.New("a program cannot run as root")
	}
	return s, nil
}

// parsePattern reads a regular expression that must match a whole argument.
func parsePattern(s string) (*regexp.Regexp, error) {
	if _, err := regexp.Compile(s); err != nil { // alone: it must not end the group
		return nil, err
	}
	return regexp.Compile(`\A(?:` + s + `)\z`)
}

var (
	variableSyntax = regexp.MustCompile(`\A[A-Za-z_][A-Za-z0-9_]*\z`)
	// insecure are the variables that glibc ignores in setuid programs: they name files from which
	// it takes code or settings.
	insecure = regexp.MustCompile(`\A(LD_.*|MALLOC_.*|GCONV_PATH|GETCONF_DIR|GLIBC_TUNABLES|HOSTALIASES|LOCALDOMAIN|LOCPATH|` +
		`NIS_PATH|NLSPATH|RESOLV_HOST_CONF|RES_OPTIONS|TMPDIR|TZDIR)\z`)
)

// parseVariable refuses variables by which a client could run other code than the program's.
func parseVariable(s string) (string, error) {
	switch {
	case !variableSyntax.MatchString(s):
		return "", errors.New("want the name of a variable")
	case insecure.MatchString(s):
		return "", errors.New("the C library reads it: a client could run other code, or change what the program does")
	}
	return s, nil
}

// Kept returns the entries of next that differ from one of p at most in who may run the
// program.
func (p Policy) Kept(next Policy) Policy {
	return slices.DeleteFunc(slices.Clone(next), func(e Entry) bool {
		was := p.Find(e.Name)
		return was == nil || was.program() != e.program()
	})
}

// program is the entry without Match and Users.
func (e *Entry) program() string {
	b, _ := json.Marshal(e) // no field can fail
	return string(b)
}

// Controllers returns the controllers of cgroups that the entry's limits need.
func (e *Entry) Controllers() (list []string) {
	if e.Memory > 0 {
		list = append(list, "memory")
	}
	if e.Processes > 0 {
		list = append(list, "pids")
	}
	return list
}

// Find returns the entry of a name, nil if there is none.
func (p Policy) Find(name string) *Entry {
	i := slices.IndexFunc(p, func(e Entry) bool { return e.Name == name })
	if i < 0 {
		return nil
	}
	return &p[i]
}

// Names reports whether an entry matches the container.
func (p Policy) Names(container port.Owner) bool {
	return slices.ContainsFunc(p, func(e Entry) bool { return e.Matches(container) })
}

// NamesUser reports whether an entry has the user of the guest.
func (p Policy) NamesUser(uid uint32) bool {
	return slices.ContainsFunc(p, func(e Entry) bool { return e.HasUser(uid) })
}

// containers reports whether the entry is for any container.
func (e *Entry) containers() bool {
	return e.Match.Name != "" || e.Match.Namespace != "" || len(e.Match.Labels) > 0
}

// Matches reports whether the entry is for the container.
func (e *Entry) Matches(container port.Owner) bool {
	return e.containers() && e.Match.MatchesOwner(container)
}

// HasUser reports whether the entry has the user of the guest. Names are looked up now; one
// that no user has is nobody's.
func (e *Entry) HasUser(uid uint32) bool {
	id := strconv.FormatUint(uint64(uid), 10)
	return slices.ContainsFunc(e.Users, func(name string) bool {
		if _, err := strconv.ParseUint(name, 10, 32); err == nil {
			return name == id
		}
		u, err := user.Lookup(name)
		return err == nil && u.Uid == id
	})
}

// Allows returns nil if the entry allows these arguments and this environment ("KEY=VALUE").
// It does not look at the container and TTY.
func (e *Entry) Allows(args, env []string) error {
	if len(args) != len(e.Args) {
		return fmt.Errorf("%d arguments, want %d", len(args), len(e.Args))
	}
	for i, a := range args {
		if strings.ContainsRune(a, 0) || !e.Args[i].MatchString(a) {
			return fmt.Errorf("argument %d, %q, does not match", i+1, a)
		}
	}
	seen := make(map[string]bool, len(env))
	for _, v := range env {
		key, value, ok := strings.Cut(v, "=")
		switch {
		case !ok || strings.ContainsRune(value, 0) || !slices.Contains(e.Env, key):
			return fmt.Errorf("variable %q", key)
		case seen[key]:
			return fmt.Errorf("variable %q twice", key)
		}
		seen[key] = true
	}
	return nil
}
