// SPDX-License-Identifier: Apache-2.0

// Package policy decides which container, or which user of the guest, may have which program
// run in the guest, and with which arguments and environment.
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
	Guests    []string         // globs: the guests that may have it run, of a program of the host
}

// Policy is a list of entries. What no entry allows is denied.
type Policy []Entry

// keys are those of an entry.
var keys = []string{"name", "match", "users", "path", "sha256", "args", "env", "directory", "user", "tty"}

// Keys returns the keys of an entry, and those that each entry needs. It also needs match
// or users.
func Keys() (all, required []string) {
	return slices.Clone(keys), []string{"name", "path", "sha256", "user"}
}

// Parse reads a policy. The error joins the first mistake of each entry.
func Parse(n yamltree.Node) (Policy, error) { return parseEntries(n, keys, complete) }

// parseEntries reads a policy whose entries have these keys. Complete requires what has no default.
func parseEntries(n yamltree.Node, keys []string, complete func(yamltree.Node, *Entry) error) (Policy, error) {
	if n.IsNull() { // "allow:" with all entries commented out
		return nil, nil
	}
	if !n.IsList() {
		return nil, n.Errorf(`want a list of entries ("- name: backup")`)
	}
	var p Policy
	var errs []error
	for _, item := range n.List() {
		e, err := parseEntry(item, keys)
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

func parseEntry(n yamltree.Node, keys []string) (e Entry, err error) {
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
		case "guests":
			e.Guests, err = list(f.Node, parseGuest)
		case "user":
			e.User, err = checked(f.Node, checkUser)
		case "tty":
			e.TTY, err = parseBool(f.Node)
		}
		if err != nil {
			return e, err
		}
	}
	if e.Directory == "" {
		e.Directory = filepath.VolumeName(e.Path) + string(filepath.Separator)
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
	s, err := n.Text()
	if err != nil {
		return "", err
	}
	if err := check(s); err != nil {
		return "", n.Errorf("%q: %v", s, err)
	}
	return s, nil
}

func parseBool(n yamltree.Node) (bool, error) {
	s, err := n.Text()
	if err == nil && s != "true" && s != "false" {
		err = n.Errorf("%q: want true or false", s)
	}
	return s == "true", err
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
	if !nameSyntax.MatchString(s) {
		return errors.New("want at most 64 letters, digits, dots, hyphens and underscores, the first a letter or digit")
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
