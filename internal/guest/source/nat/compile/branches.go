// SPDX-License-Identifier: Apache-2.0

package compile

import "iter"

// branches are what a rule does, by the set elements that led there. Nearly all rules have
// one, for which a map would take some 250 bytes. The zero value is empty.
type branches struct {
	key  string
	one  *branch // by key, nil if more has all
	more map[string]*branch
}

// get returns a branch, nil if there is none.
func (bs *branches) get(key string) *branch {
	if bs.one != nil && bs.key == key {
		return bs.one
	}
	return bs.more[key]
}

// put adds or replaces a branch.
func (bs *branches) put(key string, b *branch) {
	if bs.len() == 0 || bs.one != nil && bs.key == key {
		bs.key, bs.one = key, b
		return
	}
	if bs.more == nil {
		bs.more = make(map[string]*branch)
	}
	bs.more[key] = b
}

// drop removes a branch if it is there.
func (bs *branches) drop(key string) {
	if bs.one != nil && bs.key == key {
		bs.key, bs.one = "", nil
		return
	}
	delete(bs.more, key)
}

func (bs *branches) len() int {
	if bs.one != nil {
		return len(bs.more) + 1
	}
	return len(bs.more)
}

// all yields the branches in no order.
func (bs *branches) all() iter.Seq2[string, *branch] {
	return func(yield func(string, *branch) bool) {
		if bs.one != nil && !yield(bs.key, bs.one) {
			return
		}
		for k, b := range bs.more {
			if !yield(k, b) {
				return
			}
		}
	}
}
