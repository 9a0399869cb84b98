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

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// Entry is one program, and who may run it.
type Entry struct {
	Name      string           // by which clients ask for it; no other entry has it
	Match     rules.Match      `json:"-"` // of the container alone: name, namespace, labels; none if it is empty
	Users     []string         `json:"-"` // users of the guest, by name or number, who may run it without a container
	Path      string           // absolute
	SHA256    string           // of the file, in lower case
	Args      []*regexp.Regexp // one for each argument, which it matches whole
	Env       []string         // names of variables that the client may set
	Directory string           // in which it runs, absolute
	User      string           // as whom it runs: a name or a number, never root
	TTY       bool             // clients may ask for a terminal

	// What the program may use with all that it started; 0 is no limit.
	Memory    int64         // bytes
	Processes int           // and threads
	Time      time.Duration // from its start
}

// Serve is the command of fairlead-run that serves, so no program has this name.
const Serve = "serve"

// Policy is a list of entries. What no entry allows is denied.
type Policy []Entry

// keys are those of an entry.
var keys = []string{"name", "match", "users", "path", "sha256", "args", "env", "directory", "user", "tty", "memory", "processes", "time"}

// Parse reads a policy. The error joins the first mistake of each entry.
func Parse(n yamltree.Node) (Policy, error) {
	if n.IsNull() { // "allow:" with all entries commented out
		return nil, nil
	}
	if !n.IsList() {
		return nil, n.Errorf(`want a list of entries ("- name: backup")`)
	}
	var p Policy
	var errs []error
	for _, item := range n.List() {
		e, err := parseEntry(item)
		if err == nil {
			err = complete(item, &e)
		}
		if err == nil && p.Find(e.Name) != nil {
			err = item.Errorf("another entry has the name %q", e.Name)
		}
		p, errs = append(p, e), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return p, nil
}

func parseEntry(n yamltree.Node) (e Entry, err error) {
	fields, err := n.Map(keys...)
	if err != nil {
		return e, err
	}
	for _, f := range fields {
		switch f.Key {
		case "name":
			e.Name, err = checked(f.Node, checkName)
		case "match":
			e.Match, err = rules.ParseOwner(f.Node)
		case "users":
			e.Users, err = list(f.Node, parseUser)
		case "path":
			e.Path, err = checked(f.Node, checkPath)
		case "sha256":
			e.SHA256, err = checked(f.Node, checkSum)
		case "args":
			e.Args, err = list(f.Node, parsePattern)
		case "env":
			e.Env, err = list(f.Node, parseVariable)
		case "directory":
			e.Directory, err = checked(f.Node, checkPath)
		case "user":
			e.User, err = checked(f.Node, checkUser)
		case "tty":
			e.TTY, err = parsed(f.Node, parseBool)
		case "memory":
			e.Memory, err = parsed(f.Node, parseMemory)
		case "processes":
			e.Processes, err = parsed(f.Node, parseProcesses)
		case "time":
			e.Time, err = parsed(f.Node, parseTime)
		}
		if err != nil {
			return e, err
		}
	}
	if e.Directory == "" {
		e.Directory = "/"
	}
	return e, nil
}

// complete requires what has no default.
func complete(n yamltree.Node, e *Entry) error {
	switch {
	case e.Name == "":
		return n.Errorf("no name: want the one by which clients ask for the program")
	case !e.containers() && len(e.Users) == 0:
		return n.Errorf(`nobody may run it: want match with name, namespace or labels (name: "*" for all containers), or users`)
	case e.Path == "":
		return n.Errorf("no path: want the program's")
	case e.SHA256 == "":
		return n.Errorf("no sha256: want that of the program (sha256sum PATH)")
	case e.User == "":
		return n.Errorf("no user: want the one as whom the program runs")
	}
	return nil
}

// checked reads a text that check accepts.
func checked(n yamltree.Node, check func(string) error) (string, error) {
	return parsed(n, func(s string) (string, error) { return s, check(s) })
}

// parsed reads a text that parse understands.
func parsed[T any](n yamltree.Node, parse func(string) (T, error)) (v T, err error) {
	s, err := n.Text()
	if err != nil {
		return v, err
	}
	if v, err = parse(s); err != nil {
		return v, n.Errorf("%q: %v", s, err)
	}
	return v, nil
}

func parseBool(s string) (bool, error) {
	if s != "true" && s != "false" {
		return false, errors.New("want true or false")
	}
	return s == "true", nil
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

func parseProcesses(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 1<<22 { // the kernel has no more
		return 0, errors.New("want a number from 1 to 4194304")
	}
	return n, nil
}

func parseTime(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < time.Second {
		return 0, errors.New("want at least 1s, such as 90s or 1h30m")
	}
	return d, nil
}

// list reads a list, which may be empty.
func list[T any](n yamltree.Node, parse func(string) (T, error)) ([]T, error) {
	if !n.IsList() {
		return nil, n.Errorf("want a list")
	}
	var all []T
	for _, item := range n.List() {
		s, err := item.Text()
		if err != nil {
			return nil, err
		}
		v, err := parse(s)
		if err != nil {
			return nil, item.Errorf("%q: %v", s, err)
		}
		all = append(all, v)
	}
	return all, nil
}

var nameSyntax = regexp.MustCompile(`\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\z`)

func checkName(s string) error {
	switch {
	case !nameSyntax.MatchString(s):
		return errors.New("want at most 64 letters, digits, dots, hyphens and underscores, the first a letter or digit")
	case s == Serve:
		return errors.New("fairlead-run has a command of this name: want another one")
	}
	return nil
}

func checkPath(s string) error {
	if !filepath.IsAbs(s) || filepath.Clean(s) != s || strings.ContainsRune(s, 0) {
		return errors.New("want an absolute path in its shortest form")
	}
	return nil
}

func checkSum(s string) error {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 32 || strings.ToLower(s) != s {
		return errors.New("want 64 hexadecimal digits in lower case")
	}
	return nil
}

func parseUser(s string) (string, error) {
	if s == "" {
		return "", errors.New("want a user's name or number")
	}
	return s, nil
}

// checkUser refuses root: a job of root could change the agent and its configuration.
func checkUser(s string) error {
	switch {
	case s == "":
		return errors.New("want a user's name or number")
	case s == "root" || strings.Trim(s, "0") == "":
		return errors.New("a program cannot run as root")
	}
	return nil
}

// parsePattern reads a regular expression that must match a whole argument.
func parsePattern(s string) (*regexp.Regexp, error) {
	if _, err := regexp.Compile(s); err != nil { // alone: it must not end the group
		return nil, err
	}
	return regexp.Compile(`\A(?:` + s + `)\z`)
}

var variableSyntax = regexp.MustCompile(`\A[A-Za-z_][A-Za-z0-9_]*\z`)

// parseVariable refuses variables by which other code than the program's would run.
func parseVariable(s string) (string, error) {
	switch {
	case !variableSyntax.MatchString(s):
		return "", errors.New("want the name of a variable")
	case strings.HasPrefix(s, "LD_") || strings.HasPrefix(s, "DYLD_") || s == "GLIBC_TUNABLES":
		return "", errors.New("the dynamic linker reads it: a client could run other code")
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
